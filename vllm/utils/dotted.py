# SPDX-License-Identifier: Apache-2.0
"""Classes named by dotted path in configuration."""

import importlib
from typing import Any


def resolve_class(path: str) -> type[Any]:
    """`"package.module.Class"` -> the class; ValueError when there is no such class."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{path!r} is not a dotted path of the form package.module.Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {path!r}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{path!r} is not a class")
    return found
