# SPDX-License-Identifier: Apache-2.0
"""One decode step of the gated delta rule in CUDA C++: `csrc/cuda/hopper/gdn_decode.cu`.

Convolution, gates, the journal's pending tokens, the new ones and the gated norm in one launch. A
row's bits follow from that row alone, its states' updates are those of `gdn_commit`, and several
tokens of a sequence have the bits of as many steps.
"""

import torch
from torch import Tensor

from vllm.kernels.journal import GatedNorm, Journal
from vllm.kernels.stream_counters import per_stream
from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode_inputs import overlaps_launches
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode

HEAD_DIM = 128
WIDTH = 4
STATE_DTYPES = (torch.float32, torch.bfloat16)
#: pending tokens, and tokens of a step, that fit into shared memory beside the states
MAX_PENDING, MAX_TOKENS = 20, 16


def takes_decode(p: GdnDecode) -> bool:
    """Whether the op takes this."""
    qkv, a, b, out, ssm_state, journal = p.qkv, p.a, p.b, p.out, p.ssm_state, p.journal
    conv_weight, conv_state, norm = p.conv_weight, p.conv_state, p.norm
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = p.heads
    return (
        len(p.state_indices) > 0
        and p.beta_scale == 1.0
        and head_k_dim == head_v_dim == HEAD_DIM
        and num_v_heads in (num_k_heads, 2 * num_k_heads, 4 * num_k_heads)
        and qkv.dtype == a.dtype == b.dtype == out.dtype == torch.bfloat16
        and conv_weight.dtype == conv_state.dtype == torch.bfloat16
        and conv_weight.shape[1] == WIDTH
        and ssm_state.dtype in STATE_DTYPES
        and p.width <= MAX_TOKENS
        and (journal is None or _takes_journal(journal))
        and (norm is None or _takes_norm(norm))
        and _dense(qkv.stride(), ()) and _dense(out.stride(), (HEAD_DIM,))
        and a.stride(1) == b.stride(1) == 1
        and _dense(conv_state.stride(), (qkv.shape[1],))
        and _dense(ssm_state.stride(), (HEAD_DIM**2, HEAD_DIM), 16 // ssm_state.element_size())
        and conv_weight.is_contiguous()
        and qkv.storage_offset() % 4 == out.storage_offset() % 4 == 0
        and conv_state.storage_offset() % 4 == 0
        and conv_weight.storage_offset() % 8 == ssm_state.storage_offset() % 8 == 0
    )  # fmt: skip


def _takes_journal(journal: Journal) -> bool:
    return journal.most_pending <= MAX_PENDING and journal.inputs.dtype == torch.bfloat16


def _takes_norm(norm: GatedNorm) -> bool:
    return (
        norm.weight.dtype in STATE_DTYPES
        and norm.gate.dtype == torch.bfloat16
        and _dense(norm.gate.stride(), (HEAD_DIM,))
        and norm.gate.storage_offset() % 4 == 0
    )


def _dense(strides: tuple[int, ...], inner: tuple[int, ...], step: int = 4) -> bool:
    """Whether elements are adjacent but for the first dimension, in steps of `step`."""
    return strides[0] % step == 0 and strides[1:] == (*inner, 1)


@per_stream
def claims(device: torch.device) -> Tensor:
    """`[1]` int32, zero between launches."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def hopper_decode(p: GdnDecode) -> None:
    """Of what `takes_decode` says.

    Where launches overlap it may start before the kernel that fills `qkv` ends: states, journal and
    the convolution's inputs are fetched meanwhile.
    """
    journal, norm = p.journal, p.norm
    torch.ops.vllm_cuda.gdn_decode.default(
        p.qkv,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        p.conv_weight,
        p.conv_bias,
        p.conv_state,
        p.ssm_state,
        p.state_indices,
        p.out,
        None if journal is None else journal.steps,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        None if journal is None else journal.taken,
        None if journal is None else journal.inputs,
        None if norm is None else norm.gate,
        None if norm is None else norm.weight,
        claims(p.qkv.device),
        0.0 if norm is None else norm.eps,
        HEAD_DIM**-0.5,
        p.heads[0],
        overlaps_launches(p.qkv.device),
    )
