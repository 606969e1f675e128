# SPDX-License-Identifier: Apache-2.0
"""The published function interface of causal conv1d over the Triton kernels.

It is channel-major; storage stays token-major, so `x` and `conv_states` are transposed views.
"""

import torch
from torch import Tensor

from vllm.model_executor.layers.mamba.ops.causal_conv1d.triton import causal_conv1d, conv_update


def _token_major(x: Tensor, name: str) -> Tensor:
    rows = x.transpose(-1, -2)
    if rows.stride(-1) != 1:
        raise ValueError(f"{name} must be a transposed view of token-major storage (stride 1 over "
                         f"channels), got strides {x.stride()}")  # fmt: skip
    return rows


def _require_silu(activation: str | None) -> None:
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation {activation!r} is not supported; use 'silu'")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """Ragged prefill: `x [channels, tokens]`, `conv_states [blocks, channels, width - 1]`.

    Returns `[channels, tokens]`; states of `cache_indices [num_seqs]` (negative: padding) are
    updated in place.

    Raises:
        ValueError: channel-major storage, or an activation other than SiLU.
    """
    _require_silu(activation)
    rows = _token_major(x, "x")
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    causal_conv1d(
        rows,
        weight,
        bias,
        _token_major(conv_states, "conv_states"),
        cache_indices,
        has_initial_state,
        query_start_loc,
        out=out,
    )
    return out.transpose(0, 1)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """One token per sequence: `x [batch, channels]`, `conv_state [blocks, channels, width - 1]`.

    Without `conv_state_indices [batch]`, sequence `i` owns block `i`. Returns `[batch, channels]`.

    Raises:
        ValueError: channel-major state storage, or an activation other than SiLU.
    """
    _require_silu(activation)
    if conv_state_indices is None:
        conv_state_indices = torch.arange(len(x), dtype=torch.int32, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = _token_major(conv_state, "conv_state")
    conv_update(x, weight, bias, state, conv_state_indices, out)
    return out
