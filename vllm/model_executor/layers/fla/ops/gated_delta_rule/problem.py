# SPDX-License-Identifier: Apache-2.0
"""What the stages of the chunked gated delta rule share.

Their products of fp32 activations run as three tf32 products each (`tf32x3`), which keeps fp32
accuracy on tensor cores; 16-bit activations are not affected.
"""

from dataclasses import dataclass

from torch import Tensor

from vllm.utils.math_utils import next_power_of_2

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class ChunkedProblem:
    """One ragged batch.

    `q, k [tokens, k heads, dk]` and `v [tokens, v heads, dv]` with dense heads and any token
    stride; `a, b [tokens, v heads]` are the gate projections, or the gates `g, beta` themselves
    when `A_log` and `dt_bias` are None. The rest as in `Kernels.gdn_prefill`.

    Raises:
        ValueError: a head dimension above 256.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    ssm_state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    scale: float
    l2norm: bool

    def __post_init__(self) -> None:
        widest = max(self.head_k_dim, self.head_v_dim)
        if widest > MAX_HEAD_DIM:
            raise ValueError(f"gated delta rule head dimension {widest} exceeds {MAX_HEAD_DIM}")

    @property
    def head_k_dim(self) -> int:
        return self.k.shape[2]

    @property
    def head_v_dim(self) -> int:
        return self.v.shape[2]

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.v.shape[1] // self.k.shape[1]

    @property
    def block_k(self) -> int:
        return max(self._narrowest, next_power_of_2(self.head_k_dim))

    @property
    def block_v(self) -> int:
        return max(self._narrowest, next_power_of_2(self.head_v_dim))

    @property
    def _narrowest(self) -> int:
        # Triton 3.6 miscompiles products 16 columns wide on sm_90 (wrong sums, bad addresses).
        return 64

    @property
    def wide(self) -> bool:
        """Activations of more than 16 bits: no tensor cores, larger tiles in memory."""
        return self.v.element_size() > 2

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_indices)

    @property
    def num_seqs(self) -> int:
        return len(self.state_indices)
