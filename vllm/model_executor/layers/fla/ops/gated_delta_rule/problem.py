# SPDX-License-Identifier: Apache-2.0
"""What the ops of the gated delta rule are given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from vllm.kernels.journal import GatedNorm, Journal
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import ScanSegments
from vllm.utils.math_utils import next_power_of_2

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class _Packed:
    """Of every token `qkv [tokens, 2 * k heads * dk + v heads * dv]` (q, k, v sections,
    head-major) and the gates' projections `a, b [tokens, v heads]`; `A_log, dt_bias [v heads]`.

    `beta = beta_scale * sigmoid(b)`, `g = -exp(A_log) * softplus(a + dt_bias)` in fp32; a scale of
    2 gives transitions negative eigenvalues (arXiv 2411.12537). `ssm_state [num_blocks, v heads,
    dv, dk]` (S transposed; fp32, bf16 or fp16), `state_indices [num_seqs]` int32.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    ssm_state: Tensor
    state_indices: Tensor

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, dk and dv."""
        value_heads, dv, dk = self.ssm_state.shape[1:]
        return (self.qkv.shape[1] - value_heads * dv) // (2 * dk), value_heads, dk, dv


@dataclass(frozen=True)
class GdnPrefill(_Packed):
    """A ragged batch; `qkv` is the convolution's output.

    A state is read where `has_initial_state [num_seqs]` bool and overwritten with the final one;
    `query_start_loc [num_seqs + 1]` int32; `out [tokens, v heads, dv]`. `chunk_indices
    [num_chunks, 2]` int32 lists (sequence, chunk in sequence) and `chunk_offsets [num_seqs + 1]`
    int32 the first chunk of each sequence, both made on the host once per step. `segments` of the
    sequences are scanned at the same time, which changes results within rounding; platforms that
    do not `splits_scans` refuse them (ValueError).
    """

    has_initial_state: Tensor
    query_start_loc: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    out: Tensor
    segments: ScanSegments | None = None
    beta_scale: float = 1.0

    @cached_property
    def chunked(self) -> ChunkedProblem:
        """The same for the stages of the chunked form."""
        k_heads, v_heads, dk, dv = self.heads
        q, k, v = self.qkv.split([k_heads * dk, k_heads * dk, v_heads * dv], dim=-1)
        return ChunkedProblem(
            q=q.unflatten(-1, (k_heads, dk)),
            k=k.unflatten(-1, (k_heads, dk)),
            v=v.unflatten(-1, (v_heads, dv)),
            a=self.a,
            b=self.b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            ssm_state=self.ssm_state,
            state_indices=self.state_indices,
            has_initial_state=self.has_initial_state,
            query_start_loc=self.query_start_loc,
            chunk_indices=self.chunk_indices,
            chunk_offsets=self.chunk_offsets,
            scale=dk**-0.5,
            l2norm=True,
            beta_scale=self.beta_scale,
        )


@dataclass(frozen=True)
class GdnDecode(_Packed):
    """Equally many tokens of every sequence; `qkv` is the raw projection, before the convolution.

    `conv_weight [channels, taps]`, `conv_bias [channels]`, `conv_state [num_blocks, taps - 1,
    channels]`; `out [tokens, v heads, dv]`, after the gated norm if `norm` is given. With `journal`
    the states are read but only written by sequences that commit; outputs, and states once
    committed, have the bits they have without it. Without one, a sequence has one token.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    conv_state: Tensor
    out: Tensor
    journal: Journal | None = None
    norm: GatedNorm | None = None
    beta_scale: float = 1.0

    @property
    def width(self) -> int:
        """Tokens of a sequence."""
        return len(self.qkv) // max(len(self.state_indices), 1)


@dataclass(frozen=True)
class ChunkedProblem:
    """One ragged batch, for the stages of the chunked form. Products of fp32 activations run as
    three tf32 products each (`tf32x3`), which keeps fp32 accuracy on tensor cores.

    `q, k [tokens, k heads, dk]` and `v [tokens, v heads, dv]` with dense heads and any token
    stride; `a, b [tokens, v heads]` are the gate projections, or the gates `g, beta` themselves
    when `A_log` and `dt_bias` are None. The rest as in `GdnPrefill`.

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
    beta_scale: float = 1.0

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
