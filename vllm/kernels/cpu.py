# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels: C++ in `csrc/cpu`, vectorised for the instruction set found at run time."""

import torch
from torch import Tensor, nn

from vllm._extension import load_cpu_ops
from vllm.kernels.composed import ComposedKernels, put_rows
from vllm.kernels.decode_ring import DecodeRing, GatedNorm, RingStack
from vllm.kernels.scan_segments import ScanSegments

#: rows up to which `skinny_linear` beats oneDNN (`benchmarks/cpu_kernels.py`)
_SKINNY_ROWS = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 16}


class CpuKernels(ComposedKernels):
    """`Kernels` for float32, bfloat16 and float16 on the CPU.

    Arguments are checked in C++; a wrong dtype, shape or stride raises `RuntimeError`. Results do
    not depend on the number of threads or on what else is in the batch. Float8 caches are refused,
    so `k_scale` and `v_scale` have no use.
    """

    def __init__(self) -> None:
        load_cpu_ops()
        ops = torch.ops.vllm_cpu
        self.isa: str = ops.isa()
        # torch multiplies 16-bit matrices by oneDNN but fp32 ones by MKL, half as fast on AMD.
        self._onednn_linear = None
        if torch.backends.mkldnn.is_available():
            self._onednn_linear = torch.ops.mkldnn._linear_pointwise.default
        self._rms_norm = ops.rms_norm.default
        self._fused_add_rms_norm = ops.fused_add_rms_norm.default
        self._gated_rms_norm = ops.gated_rms_norm.default
        self._silu_and_mul = ops.silu_and_mul.default
        self._mul_sigmoid = ops.mul_sigmoid.default
        self._skinny_linear = ops.skinny_linear.default
        self._qk_norm_rope_cache = ops.qk_norm_rope_cache.default
        self._write_kv_cache = ops.write_kv_cache.default
        self._write_rows = ops.write_rows.default
        self._paged_attention = ops.paged_attention.default
        self._causal_conv1d = ops.causal_conv1d.default
        self._gdn_prefill = ops.gdn_prefill.default
        self._gdn_decode = ops.gdn_decode.default

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
        return self._rms_norm(x, weight, eps, one_plus)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self._fused_add_rms_norm(x, residual, weight, eps, one_plus)

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        done: Tensor | None = None,
    ) -> Tensor:
        normed = self._gated_rms_norm(x, gate, weight, eps)
        return normed if out is None else put_rows(out, normed.view(out.shape), done).flatten(1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._silu_and_mul(gate_up)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._mul_sigmoid(x, gate)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Few rows read the weight once (our kernel); many are a matmul (oneDNN)."""
        if x.shape[0] <= _SKINNY_ROWS[x.dtype]:
            return self.skinny_linear(x, weight, bias)
        if x.dtype is torch.float32 and self._onednn_linear is not None:
            return self._onednn_linear(x, weight, bias, "none", [], "")
        return nn.functional.linear(x, weight, bias)

    def fp8_product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._skinny_linear(x, weight, None)

    def skinny_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x [tokens, k] @ weight [n, k].T + bias [n]`, reading the weight once as stored.

        A row's bits do not depend on the other rows. With fp32 `x` the weight may be float8 e4m3,
        which is widened on the way. Faster than `torch.nn.functional.linear` at
        any row count in fp32, and up to about 16 rows in bf16 (`benchmarks/cpu_kernels.py`).
        """
        return self._skinny_linear(x, weight, bias)

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
        return self._qk_norm_rope_cache(
            qkv,
            positions,
            cos_sin,
            q_norm_weight,
            k_norm_weight,
            kv_cache,
            slot_mapping,
            num_heads,
            num_kv_heads,
            head_dim,
            gated,
            eps,
            one_plus,
        )

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
        self._write_kv_cache(key, value, kv_cache, slot_mapping)

    def write_rows(self, rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        self._write_rows(rows, cache, slot_mapping)

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
        """The lengths are read where the work is planned; the two maxima serve CUDA grids."""
        self._paged_attention(
            query, kv_cache, block_table, seq_lens, query_start_loc, scale, sliding_window, out
        )
        self.apply_gate(out, gate)

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
        self._causal_conv1d(
            x, weight, bias, conv_state, state_indices, has_initial_state, query_start_loc, out
        )

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
        """A thread walks its sequence chunk by chunk, so the chunk index is not needed here.

        Raises ValueError with segments: threads have sequences and heads enough.
        """
        if segments is not None:
            raise ValueError("the CPU's kernels scan whole sequences; give no segments")
        self._gdn_prefill(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            ssm_state,
            state_indices,
            has_initial_state,
            query_start_loc,
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            out,
        )

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
        """Raises ValueError with a ring: memory is not what bounds a CPU's decode."""
        if ring is not None:
            raise ValueError("the CPU's kernels write the state at every step; give no ring")
        self._gdn_decode(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            conv_weight,
            conv_bias,
            conv_state,
            ssm_state,
            state_indices,
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            out,
        )
        if norm is not None:
            self.gated_rms_norm(out, norm.gate, norm.weight, norm.eps, out)

    def gdn_commit(self, rings: RingStack, entries: Tensor) -> None:
        """Raises ValueError: see `gdn_decode`."""
        raise ValueError("the CPU's kernels keep no ring, so there is nothing to commit")
