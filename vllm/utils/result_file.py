# SPDX-License-Identifier: Apache-2.0
"""Files for results: looked at before what takes long, so that it is not for nothing."""

import os
from pathlib import Path

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import flag_name


def check_file(parameter: str, path: str | Path | None) -> None:
    """Raise `VLLMValidationError` for the file of a result that cannot be written; None is none."""
    if path is not None and (reason := _reason_not_to_write(Path(path))):
        raise VLLMValidationError(f"{flag_name(parameter)} {path}: {reason}", parameter, path)


def _reason_not_to_write(file: Path) -> str | None:
    folder = file.parent
    if not folder.is_dir():
        return f"no folder {folder}"
    if file.is_dir():
        return "it is a folder; name a file in it"
    if not os.access(file if file.exists() else folder, os.W_OK):
        return "it cannot be written"
    return None
