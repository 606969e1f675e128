# SPDX-License-Identifier: Apache-2.0
"""Python files named on the command line that register parsers when they are imported."""

import importlib.util
import sys
from pathlib import Path

from vllm.exceptions import VLLMValidationError


def import_parser_file(path: str, flag: str) -> None:
    """Run the Python file at `path` once per process.

    Raises `VLLMValidationError` naming `flag` when it is no readable Python file or fails.
    """
    file = Path(path).resolve()
    name = f"vllm_parser_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise VLLMValidationError(f"{flag}: {path!r} is not a readable Python file", value=path)
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file):
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise VLLMValidationError(f"{flag}: {path!r} failed: {error}", value=path) from error
