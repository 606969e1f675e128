# SPDX-License-Identifier: Apache-2.0
"""The layer kernels a platform must provide.

Layers call `current_platform.kernels.<op>(...)`. Three implementations share this interface:
`NaiveKernels` (plain torch, any float dtype including fp64: the reference), `CpuKernels` (C++ in
`csrc/cpu`) and `CudaKernels` (Triton, and CUDA C++ in `csrc/cuda`).

Conventions, for every op:

- token-major activations; the last dimension is contiguous, the row stride is arbitrary, so a
  slice of a wider projection can be passed without a copy;
- statistics, gates, softmax and recurrent accumulation run in fp32 (fp64 for fp64 inputs);
- a *slot* is a token's place in a paged cache, `block_id * block_size + offset`; a *state index*
  is a recurrent state's block id. Rows whose slot or state index is negative are padding: they
  are never read from or written to a cache, and their output rows are unspecified;
- caches are strided views over the page arena: dimension 0 (blocks) has an arbitrary stride, the
  inner dimensions are dense;
- ops return fresh tensors or fill `out`; they never modify an activation in place.
"""

from typing import Protocol

from torch import Tensor

from vllm.kernels.decode_ring import DecodeRing, GatedNorm, RingStack
from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.kernels.scan_segments import ScanSegments


class Kernels(Protocol):
    """Operations used by the layers; see the module docstring for the conventions."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x [tokens, k] @ weight [n, k].T + bias [n] -> [tokens, n]`, fp32 accumulation."""
        ...

    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`silu_and_mul(linear(x, weight, bias))`: `[tokens, k]`, `weight [2n, k]`, `bias [2n]`
        -> `[tokens, n]`. The gate's n rows come first; both halves are rounded to the model dtype
        before the activation, as in the two separate ops.
        """
        ...

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        """`linear(x, weight, bias)`, rounded, onto `residual [tokens, n]`: added, or to be added by
        whoever reads the stream; the bits are the same.
        """
        ...

    def norm_linear(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`linear(norm(s), weight, bias) [tokens, n]` and `s`, the stream `[tokens, k]` added up.

        `s` and its norm are rounded as by `fused_add_rms_norm` and `rms_norm`. `s` is not written
        to afterwards and may be captured as is.
        """
        ...

    def norm_linear_silu_and_mul(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`norm_linear` with `linear_silu_and_mul` for the matmul."""
        ...

    def linear_fp8(
        self,
        x: Tensor | Fp8Rows,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        """`linear` with a float8 weight, activations made float8 on the way.

        `x [tokens, k]`, `weight [n, k]` e4m3, `weight_scale [n]` fp32 -> `[tokens, n]` in the dtype
        of `x`. Each token is scaled by its own largest value, or all by `input_scale [1]`
        (`x / input_scale` is what is rounded). Arithmetic: `vllm.kernels.fp8`. Tokens that another
        op has made float8 are taken as they are.
        """
        ...

    def silu_and_mul_fp8(self, gate_up: Tensor) -> Fp8Rows:
        """`silu_and_mul`, rounded to the dtype of `gate_up` and then made float8 token by token."""
        ...

    def fused_add_rms_norm_fp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Fp8Rows, Tensor]:
        """`fused_add_rms_norm`, its first result made float8 token by token."""
        ...

    def linear_fp8_block(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        block_scale: Tensor | None = None,
    ) -> Tensor:
        """`linear_fp8` with scales per token and 128 channels, and per weight row and 128 channels.

        `weight_scale [ceil(k / 128), n]` fp32; `block_scale [n / 128, k / 128]`: the same where
        each 128 rows share one, for libraries.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
        """`x [..., n]` normalised over the last dimension by `rsqrt(mean(x^2) + eps)`.

        `one_plus=False`: the normalised value is rounded to `x.dtype`, then times `weight [n]`
        (Llama, Qwen3). `one_plus=True`: fp32 `norm(x) * (1 + weight)`, rounded once (Qwen3.5).
        `x` may have arbitrary leading strides (per-head views of a projection).
        """
        ...

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`(rms_norm(s), s)` with `s = x + residual` rounded to the model dtype; all `[tokens, n]`.

        Both results are fresh tensors: `s` is the residual stream and may be captured as is.
        """
        ...

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        done: Tensor | None = None,
    ) -> Tensor:
        """`(round(norm(x)) * weight) * silu(gate)` per head; gate activation in fp32.

        `x [tokens, heads, n]`, `gate [tokens, heads, n]` (any token stride), `weight [n]`
        -> `[tokens, heads * n]`, in `out` (dense, may be `x`) if it is given. Of the first tokens,
        those whose entry of `done [up to tokens]` int32 is not negative stay as they are in `out`.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate_up[:, :n]) * gate_up[:, n:]`: `[tokens, 2n] -> [tokens, n]`."""
        ...

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x * sigmoid(gate)`: `x [tokens, heads, n]`, `gate [tokens, heads, n]` with any token
        and head stride -> `[tokens, heads * n]`."""
        ...

    def qk_norm_rope_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        gated: bool,
        eps: float,
        one_plus: bool,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Everything between the qkv projection and attention, and the cache write.

        `qkv [tokens, num_heads * head_dim * (2 if gated else 1) + 2 * num_kv_heads * head_dim]`;
        when gated each query head is `[q head_dim | gate head_dim]`. Optional per-head RMS norm
        of q and k (weights `[head_dim]`), then NeoX-style rotation of the first `rot` dims by
        `cos_sin [max_position, rot]` fp32 (`rot/2` cosines, then `rot/2` sines) at
        `positions [tokens]` int64. k and v are written to `kv_cache
        [num_blocks, 2, block_size, num_kv_heads, head_dim]` at `slot_mapping [tokens]` int64.
        Returns q `[tokens, num_heads, head_dim]`. Rotation maths: RoFormer (arXiv 2104.09864).
        """
        ...

    def write_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write `key, value [tokens, num_kv_heads, head_dim]` to the paged cache.

        A float8 cache (e4m3) holds `key / k_scale` and `value / v_scale`, rounded to nearest even
        and saturated; the scales are used with such caches only.
        """
        ...

    def write_rows(self, rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Write `rows [tokens, columns, width]`, captured hidden states, to their paged cache.

        `cache [num_blocks, block_size, columns, width]`, `slot_mapping [tokens]` int64.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        sliding_window: int | None,
        out: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        gate: Tensor | None = None,
    ) -> None:
        """Causal attention of a ragged batch over the paged cache (keys already written).

        `query [tokens, num_heads, head_dim]`, `kv_cache` as above, `block_table
        [num_seqs, max_blocks]` int32, `seq_lens [num_seqs]` int32 (context including this step's
        tokens), `query_start_loc [num_seqs + 1]` int32, `out` like `query`. Query row `i` of a
        sequence has position `seq_len - query_len + i` and sees positions `<=` its own and, with
        `sliding_window`, `> position - sliding_window`. Query head `h` reads kv head
        `h // (num_heads // num_kv_heads)`. Sequences of `seq_len 0` are padding.
        Keys and values of a float8 cache are multiplied by `k_scale` and `v_scale`. With `gate`,
        like `query` with any token and head stride, the result is `mul_sigmoid(out, gate)`.
        """
        ...

    def causal_conv1d(
        self,
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
        ...

    def gdn_prefill(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_state: Tensor,
        state_indices: Tensor,
        has_initial_state: Tensor,
        query_start_loc: Tensor,
        chunk_indices: Tensor,
        chunk_offsets: Tensor,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        out: Tensor,
        segments: ScanSegments | None = None,
    ) -> None:
        """Gated delta rule over a ragged batch, in chunks of 64 tokens.

        `qkv [tokens, 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim]` is the convolution's
        output (q, k, v sections, head-major); `a, b [tokens, num_v_heads]`; `A_log, dt_bias
        [num_v_heads]`. `beta = sigmoid(b)`, `g = -exp(A_log) * softplus(a + dt_bias)` in fp32;
        q and k are l2-normalised (`x * rsqrt(sum(x^2) + 1e-6)`), q times `head_k_dim ** -0.5`;
        value head j uses key head `j // (num_v_heads // num_k_heads)`. Recurrence per value head
        (Gated DeltaNet, arXiv 2412.06464): `S *= exp(g); d = beta * (v - S^T k); S += k d^T;
        o = S^T q`. `ssm_state [num_blocks, num_v_heads, head_v_dim, head_k_dim]` (S transposed,
        fp32 or bf16) is read where `has_initial_state` and overwritten with the final state.
        `out [tokens, num_v_heads, head_v_dim]`. `chunk_indices [num_chunks, 2]` int32 lists
        (sequence, chunk in sequence) and `chunk_offsets [num_seqs + 1]` int32 the first chunk of
        each sequence, both made on the host once per step. `segments` of the sequences are scanned
        at the same time, which changes results within rounding; platforms that do not
        `splits_scans` refuse them (ValueError).
        """
        ...

    def gdn_decode(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        conv_state: Tensor,
        ssm_state: Tensor,
        state_indices: Tensor,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        out: Tensor,
        ring: DecodeRing | None = None,
        norm: GatedNorm | None = None,
    ) -> None:
        """One token per sequence: convolution update, gating, the recurrent step, and `norm`.

        `qkv [num_seqs, channels]` is the raw projection (before the convolution); the rest as in
        `causal_conv1d` and `gdn_prefill`. `out [num_seqs, num_v_heads, head_v_dim]`, after the
        gated norm if it is given. With `ring` the states are read but only written by sequences
        that commit; outputs, and states once committed, have the bits they have without it.
        """
        ...

    def gdn_commit(self, rings: RingStack, entries: Tensor) -> None:
        """Write to their blocks, for all layers, the tokens that some batch rows have pending.

        `entries [n, 4]` int32: batch row, pending tokens, block, 0. Platforms that do not
        `defers_commit` refuse this and `ring` (ValueError).
        """
        ...
