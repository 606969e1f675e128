# SPDX-License-Identifier: Apache-2.0
"""How a matmul of few tokens is cut up, by its weight's size: data for `vllm.kernels.skinny`.

Each within 1 % of the fastest of about 120 launches, by the time of a quarter of Qwen3.5-4B's
decode step on an H200 (132 SMs, 227 KB of shared memory each) at 1, 8 and 16 tokens together. All
variants add up a row in the same order, so results do not depend on the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

KB = 1024


@dataclass(frozen=True)
class SkinnyLaunch:
    """Which compiled variant of `csrc/cuda/skinny.cu` runs, and how it fills an SM.

    `ring_bytes` of a CTA's shared memory hold weights that are under way.
    """

    variant: int
    ring_bytes: int
    ctas_per_sm: int

    @property
    def fields(self) -> tuple[int, int, int]:
        """As the ops take them."""
        return self.variant, self.ring_bytes, self.ctas_per_sm


#: at most 16 weight rows at once
MANY_ROWS = SkinnyLaunch(variant=0, ring_bytes=150 * KB, ctas_per_sm=1)
#: all rows of an SM at once, at most 24
FEW_ROWS = SkinnyLaunch(variant=1, ring_bytes=102 * KB, ctas_per_sm=1)
FEW = 24 * 132


def skinny_launch(n: int, gated: bool, norm: bool) -> SkinnyLaunch:
    """The launch for a weight of `n` rows; `gated`: gate and up projection, fused with SiLU;
    `norm`: of what it multiplies, which only one variant holds whole."""
    return FEW_ROWS if n <= FEW and not gated and not norm else MANY_ROWS
