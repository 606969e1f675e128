# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DrawProblem:
    """What `Kernels.draw_tokens` draws from: `softmax(logits / temperature)`, filtered.

    `logits [n, vocab]` of any float dtype up to fp32, `temperature [n]` fp32 (0 takes the argmax),
    `seeds, positions [n]` int64: a draw follows from these two and its row. min-p, then top-k, then
    top-p narrow the distribution, None: off for all rows; `top_k [n]` int64, `top_p, min_p [n]`
    fp32; vocabulary size, 1 and 0 switch them off for a row. Ties with the least likely token kept
    are kept; the likeliest token always is. `top_p_alone`: a row may use top-p and nothing else.
    """

    logits: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    top_p_alone: bool = False
