# SPDX-License-Identifier: Apache-2.0
"""Reference kernels in plain torch, on any device and in any float dtype."""

import torch
from torch import Tensor

from vllm.kernels import naive_gdn, naive_journal
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import GatedNorm, Journal, JournalStack
from vllm.kernels.scan_segments import ScanSegments
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import naive_causal_conv1d


class NaiveKernels(Kernels):
    """`Kernels` by their definitions; fp64 inputs are computed in fp64 throughout.

    It loops over sequences on the host, so it reads lengths and indices from the device: a
    reference for tests, not a serving path.
    """

    platform = "naive"

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
            naive_gdn.gates_of(a, b, A_log, dt_bias),
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
        journal: Journal | None = None,
        norm: GatedNorm | None = None,
    ) -> None:
        num_seqs = len(state_indices)
        heads = (num_k_heads, num_v_heads, head_k_dim, head_v_dim)
        gates = naive_gdn.gates_of(a, b, A_log, dt_bias)
        if journal is None:
            carried = torch.ones(num_seqs, dtype=torch.bool)
            starts = torch.arange(num_seqs + 1)
            mixed = torch.empty_like(qkv)
            naive_causal_conv1d(
                qkv, conv_weight, conv_bias, conv_state, state_indices, carried, starts, mixed
            )
            step = (mixed, gates, ssm_state, state_indices)
            naive_gdn.gated_delta_rule(*step, carried, starts, heads, out)
        else:
            width = len(qkv) // max(num_seqs, 1)
            mixed = naive_journal.convolve_tokens(
                qkv, conv_weight, conv_bias, conv_state, state_indices, journal, width
            )
            step = (mixed, gates, ssm_state, state_indices)
            naive_journal.decode(*step, journal, heads, out, width)
        if norm is not None:
            self.gated_rms_norm(out, norm.gate, norm.weight, norm.eps, out)

    def gdn_commit(self, stack: JournalStack, entries: Tensor) -> None:
        naive_journal.commit(stack, entries)
