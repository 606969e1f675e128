# SPDX-License-Identifier: Apache-2.0
"""What `--middleware` names."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.class_registry import resolve_class


def import_middleware(path: str) -> Any:
    """The class or function at a dotted path; `VLLMValidationError` when there is none."""
    try:
        return resolve_class(path)
    except ValueError as error:
        raise VLLMValidationError(f"--middleware: {error}", "middleware", path) from None
