# SPDX-License-Identifier: Apache-2.0
"""Plain torch causal depthwise convolution with carried state."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    *,
    out: Tensor,
) -> None:
    """Depthwise causal convolution and SiLU over a ragged batch, carrying state.

    `x, out [tokens, channels]`, `weight [channels, width]`, `conv_state
    [num_blocks, width - 1, channels]` holds the last raw inputs, oldest first;
    `state_indices [num_seqs]` int32, `has_initial_state [num_seqs]` bool (False: start from
    zeros whatever the block holds), `query_start_loc [num_seqs + 1]` int32. The state is
    updated to the last `width - 1` inputs (counting the initial state for short sequences).
    """
    starts = query_start_loc.tolist()
    carried = has_initial_state.tolist()
    for seq, index in enumerate(state_indices.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if index < 0 or start == end:
            continue
        state = conv_state[index]
        before = state.to(x.dtype) if carried[seq] else x.new_zeros(state.shape)
        rows = torch.cat([before, x[start:end]])
        out[start:end] = convolve(rows, weight, bias)
        state.copy_(rows[len(rows) - len(state) :])


def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of the convolution: `rows [width - 1 + n, channels]`, `weight [channels, width]`."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    width = weight.shape[1]
    y = (rows.to(wide).unfold(0, width, 1) * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return silu(y).to(rows.dtype)
