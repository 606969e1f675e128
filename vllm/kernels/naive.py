# SPDX-License-Identifier: Apache-2.0
"""Reference kernels in plain torch, on any device and in any float dtype."""

import torch
from torch import Tensor, nn

from vllm.kernels import fp8, naive_attention, naive_gdn, naive_norm, naive_ring
from vllm.kernels.composed import ComposedKernels, put_rows
from vllm.kernels.decode_ring import DecodeRing, GatedNorm, RingStack
from vllm.kernels.scan_segments import ScanSegments
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import naive_causal_conv1d


class NaiveKernels(ComposedKernels):
    """`Kernels` by their definitions; fp64 inputs are computed in fp64 throughout.

    It loops over sequences on the host, so it reads lengths and indices from the device: a
    reference for tests, not a serving path.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
        return naive_norm.rms_norm(x, weight, eps, one_plus).contiguous()

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return naive_norm.rms_norm(total, weight, eps, one_plus), total

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        done: Tensor | None = None,
    ) -> Tensor:
        normed = naive_norm.gated_rms_norm(x, gate, weight, eps)
        return normed if out is None else put_rows(out, normed.view(out.shape), done).flatten(1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return naive_norm.silu_and_mul(gate_up)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return naive_norm.mul_sigmoid(x, gate)

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
        q_width, kv_width = head_dim * (2 if gated else 1), num_kv_heads * head_dim
        q, k, v = qkv.split([num_heads * q_width, kv_width, kv_width], dim=-1)
        q = q.unflatten(-1, (num_heads, q_width))[..., :head_dim]
        k, v = (x.unflatten(-1, (num_kv_heads, head_dim)) for x in (k, v))
        if q_norm_weight is not None:
            q = naive_norm.rms_norm(q, q_norm_weight, eps, one_plus)
        if k_norm_weight is not None:
            k = naive_norm.rms_norm(k, k_norm_weight, eps, one_plus)
        angles = cos_sin[positions]
        k = naive_norm.rotate(k, angles)
        self.write_kv_cache(k, v, kv_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        return naive_norm.rotate(q, angles).contiguous()

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
        if kv_cache.dtype is fp8.FP8:
            key = fp8.to_fp8(key.float() * (1 / k_scale))
            value = fp8.to_fp8(value.float() * (1 / v_scale))
        naive_attention.write_slots(key, kv_cache[:, 0], slot_mapping)
        naive_attention.write_slots(value, kv_cache[:, 1], slot_mapping)

    def write_rows(self, rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        naive_attention.write_slots(rows, cache, slot_mapping)

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
        scale *= k_scale
        naive_attention.paged_attention(
            query, kv_cache, block_table, seq_lens, query_start_loc, scale, sliding_window, out
        )
        if v_scale != 1.0:
            out *= v_scale
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
        naive_causal_conv1d(
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
        if segments is not None:
            raise ValueError("the reference scans whole sequences; give no segments")
        naive_gdn.gated_delta_rule(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            ssm_state,
            state_indices,
            has_initial_state,
            query_start_loc,
            (num_k_heads, num_v_heads, head_k_dim, head_v_dim),
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
        num_seqs = len(state_indices)
        carried = torch.ones(num_seqs, dtype=torch.bool)
        starts = torch.arange(num_seqs + 1)
        mixed = torch.empty_like(qkv)
        naive_causal_conv1d(
            qkv, conv_weight, conv_bias, conv_state, state_indices, carried, starts, mixed
        )
        heads = (num_k_heads, num_v_heads, head_k_dim, head_v_dim)
        step = (mixed, a, b, A_log, dt_bias, ssm_state, state_indices)
        if ring is None:
            naive_gdn.gated_delta_rule(*step, carried, starts, heads, out)
        else:
            naive_ring.decode(*step, ring, heads, out)
        if norm is not None:
            self.gated_rms_norm(out, norm.gate, norm.weight, norm.eps, out)

    def gdn_commit(self, rings: RingStack, entries: Tensor) -> None:
        naive_ring.commit(rings, entries)
