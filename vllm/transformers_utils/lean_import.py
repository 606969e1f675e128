# SPDX-License-Identifier: Apache-2.0
"""Importing a config class of transformers without all of its models.

Releases before 5.23 import what every model class needs (compiler, distributed tensors), for
seconds, to write a config class's docstring; where that import fails, they leave the part out.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

_MODELS = "transformers.models.auto.modeling_auto"


@contextmanager
def without_model_classes() -> Iterator[None]:
    """Inside the block an import of the auto model classes is an ImportError, as Python has it for
    modules entered as None; what is imported already stays available."""
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    if _MODELS in modules:
        yield
        return
    modules[_MODELS] = None
    try:
        yield
    finally:
        del modules[_MODELS]
