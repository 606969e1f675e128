# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule ops of the interface over the packed projections."""

from dataclasses import dataclass

from torch import Tensor

from vllm.kernels.hopper_gdn import HopperGdn
from vllm.kernels.hopper_gdn_decode import takes_decode
from vllm.kernels.journal import GatedNorm, Journal, JournalStack
from vllm.kernels.norm.triton import gated_rms_norm
from vllm.kernels.scan_segments import ScanSegments
from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode import launch_for, run_decode
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode_inputs import (
    decode_inputs,
    overlaps_launches,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem


def split_qkv(
    qkv: Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views `q, k [tokens, num_k_heads, head_k_dim]`, `v [tokens, num_v_heads, head_v_dim]`."""
    key_dim = num_k_heads * head_k_dim
    q, k, v = qkv.split([key_dim, key_dim, num_v_heads * head_v_dim], dim=-1)
    q, k = (x.unflatten(-1, (num_k_heads, head_k_dim)) for x in (q, k))
    return q, k, v.unflatten(-1, (num_v_heads, head_v_dim))


@dataclass(frozen=True)
class GdnOps:
    """The ops with a choice of kernels: `hopper`'s where they take a problem, else Triton's."""

    hopper: HopperGdn | None

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
        """See `Kernels.gdn_prefill`."""
        q, k, v = split_qkv(qkv, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
        problem = ChunkedProblem(
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            ssm_state=ssm_state,
            state_indices=state_indices,
            has_initial_state=has_initial_state,
            query_start_loc=query_start_loc,
            chunk_indices=chunk_indices,
            chunk_offsets=chunk_offsets,
            scale=head_k_dim**-0.5,
            l2norm=True,
        )
        run_chunked(problem, out, self.hopper, segments)

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
        """See `Kernels.gdn_decode`. In Triton: two launches, the second of which reads the states
        meanwhile, and for many sequences the norm."""
        if len(state_indices) == 0:
            return
        overlaps = overlaps_launches(qkv.device)
        heads = (num_k_heads, num_v_heads, head_k_dim, head_v_dim)
        decode = self.hopper and self.hopper.decode
        if decode and takes_decode(
            qkv, a, b, conv_weight, conv_state, ssm_state, heads, out, journal, norm
        ):
            decode(
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
                out,
                journal,
                norm,
                overlaps,
            )
            return
        inputs = decode_inputs(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            conv_weight,
            conv_bias,
            conv_state,
            state_indices,
            journal,
            heads,
            overlaps,
        )
        launch = launch_for(len(state_indices), head_k_dim, head_v_dim)
        fused = norm if launch.rows >= head_v_dim else None
        run_decode(
            inputs, ssm_state, state_indices, journal, fused, launch, overlaps, head_k_dim, out
        )
        if norm is not None and fused is None:
            gated_rms_norm(out, norm.gate, norm.weight, norm.eps, out)


def gdn_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `Kernels.gdn_commit`."""
    run_commit(stack, entries)
