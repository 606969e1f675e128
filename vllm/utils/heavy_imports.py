# SPDX-License-Identifier: Apache-2.0
"""What a front end and an engine core both import, for most of a start's time beside the device."""

from __future__ import annotations

import importlib

from vllm.utils.gc_paused import gc_paused

#: transformers before torch, which it does not import by itself
_MODULES = (
    "transformers",
    "torch",
    "transformers.models.auto.configuration_auto",
    "vllm.config",
)


def import_heavy_modules() -> None:
    """Import torch, transformers and what a configuration is made of."""
    with gc_paused():
        for module in _MODULES:
            importlib.import_module(module)
