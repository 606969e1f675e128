# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule ops of the interface over the packed projections."""

import torch
from torch import Tensor

from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem
from vllm.model_executor.layers.fla.ops.gated_delta_rule.recurrent import run_recurrent
from vllm.model_executor.layers.mamba.ops.causal_conv1d.kernel import conv_update


def split_qkv(
    qkv: Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views `q, k [tokens, num_k_heads, head_k_dim]`, `v [tokens, num_v_heads, head_v_dim]`."""
    key_dim = num_k_heads * head_k_dim
    q, k, v = qkv.split([key_dim, key_dim, num_v_heads * head_v_dim], dim=-1)
    q, k = (x.unflatten(-1, (num_k_heads, head_k_dim)) for x in (q, k))
    return q, k, v.unflatten(-1, (num_v_heads, head_v_dim))


def gdn_prefill(
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
    run_chunked(problem, out)


def gdn_decode(
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
) -> None:
    """See `Kernels.gdn_decode`: the convolution update, then the recurrent step."""
    mixed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    conv_update(qkv, conv_weight, conv_bias, conv_state, state_indices, mixed)
    q, k, v = split_qkv(mixed, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    run_recurrent(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        ssm_state,
        state_indices,
        None,
        head_k_dim**-0.5,
        True,
        out,
    )
