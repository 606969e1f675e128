# SPDX-License-Identifier: Apache-2.0
"""Linear attention operations, one package each.

The kernels load on first use, so that the plain torch definitions need no Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
    from vllm.model_executor.layers.fla.ops.gated_delta_rule.recurrent import (
        fused_recurrent_gated_delta_rule,
    )

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

_MODULES = {
    "chunk_gated_delta_rule": "chunk",
    "fused_recurrent_gated_delta_rule": "recurrent",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.gated_delta_rule.{_MODULES[name]}"))[name]
