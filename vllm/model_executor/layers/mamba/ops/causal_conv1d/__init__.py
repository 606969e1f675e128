# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution with carried state.

The functions load on first use, so that the plain torch definition needs no Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d.functional import (
        causal_conv1d_fn,
        causal_conv1d_update,
    )

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.functional"))[name]
