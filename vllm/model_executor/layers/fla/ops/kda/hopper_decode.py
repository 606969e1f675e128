# SPDX-License-Identifier: Apache-2.0
"""One decode step of Kimi delta attention in CUDA C++: `csrc/cuda/hopper/kda_decode.cu`.

Convolution, gates, the journal's pending tokens and the new one in one launch. A row's bits follow
from that row alone, and its states' updates are those of `kda_commit`.
"""

import torch

from vllm.model_executor.layers.fla.ops.gated_delta_rule.decode_inputs import overlaps_launches
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode

HEAD_DIM = 128
TAPS = 4
STATE_DTYPES = (torch.float32, torch.bfloat16)
#: pending tokens whose entries leave room for the states of two heads on a multiprocessor
MAX_PLACES = 15


def takes_decode(problem: KdaDecode) -> bool:
    """Whether the op takes this: one bfloat16 token per sequence, heads of 128, aligned rows."""
    p = problem
    qkv, gates, out, state, journal = p.qkv, p.gates, p.out, p.state, p.journal
    _, _, dk, dv = p.heads
    return (
        len(p.state_indices) > 0
        and p.width == 1
        and dk == dv == HEAD_DIM
        and all(
            x.dtype == torch.bfloat16
            for x in (qkv, gates.a, gates.b, out, p.conv_weight, p.conv_state)
        )
        and gates.A_log.dtype == gates.dt_bias.dtype == torch.float32
        and state.dtype in STATE_DTYPES
        and p.conv_weight.shape[1] == TAPS
        and (journal is None or (journal.width == 1 and journal.places <= MAX_PLACES))
        and _dense(qkv.stride(), ())
        and _dense(gates.a.stride(), (HEAD_DIM,), 1) and _dense(gates.b.stride(), (), 1)
        and _dense(out.stride(), (HEAD_DIM,), 1)
        and _dense(p.conv_state.stride(), (qkv.shape[1],))
        and _dense(state.stride(), (HEAD_DIM**2, HEAD_DIM), 16 // state.element_size())
        and all(x.is_contiguous() for x in (p.conv_weight, gates.A_log, gates.dt_bias))
        and qkv.storage_offset() % 4 == p.conv_state.storage_offset() % 4 == 0
        and p.conv_weight.storage_offset() % 8 == state.storage_offset() % 8 == 0
        and gates.A_log.storage_offset() % 4 == gates.dt_bias.storage_offset() % 4 == 0
    )  # fmt: skip


def _dense(strides: tuple[int, ...], inner: tuple[int, ...], step: int = 4) -> bool:
    """Whether elements are adjacent but for the first dimension, in steps of `step`."""
    return strides[0] % step == 0 and strides[1:] == (*inner, 1)


def hopper_decode(problem: KdaDecode) -> None:
    """Of what `takes_decode` says.

    Where launches overlap it may start before the kernel that fills `qkv` ends: states, journal and
    the convolution's inputs are fetched meanwhile.
    """
    p, gates, journal = problem, problem.gates, problem.journal
    torch.ops.vllm_cuda.kda_decode.default(
        p.qkv,
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias,
        p.conv_weight,
        p.conv_state,
        p.state,
        p.state_indices,
        p.out,
        None if journal is None else journal.steps,
        None if journal is None else journal.keys,
        None if journal is None else journal.errors,
        None if journal is None else journal.decays,
        HEAD_DIM**-0.5,
        overlaps_launches(p.qkv.device),
    )
