# SPDX-License-Identifier: Apache-2.0
"""Plain torch decode whose state is written back later (`vllm.kernels.decode_ring`)."""

from torch import Tensor

from vllm.kernels.decode_ring import DecodeRing, RingStack
from vllm.kernels.naive_gdn import split_qkv
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import (
    gdn_gates,
    naive_recurrent_step,
)


def decode(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    ring: DecodeRing,
    heads: tuple[int, int, int, int],
    out: Tensor,
) -> None:
    """See `Kernels.gdn_decode`; `mixed [n, channels]` is the convolution's output, `heads` are the
    last arguments of `split_qkv`.

    Raises:
        ValueError: a sequence that does not commit has no free slot.
    """
    for seq, index in enumerate(state_indices.tolist()):
        if index < 0:
            continue
        row, pending, commits, _ = ring.steps[seq].tolist()
        if not commits and pending >= ring.slots:
            raise ValueError(f"{pending} tokens are pending in row {row}: there is no free slot")
        q, k, v = (t[0] for t in split_qkv(mixed[seq : seq + 1], *heads))
        g, beta = gdn_gates(a[seq].to(q.dtype), b[seq].to(q.dtype), A_log, dt_bias)
        decay = g.exp()
        state = _replay(ssm_state[index], ring, row, pending).mT.to(q.dtype)
        o, error, state = naive_recurrent_step(q * heads[2] ** -0.5, k, v, decay, beta, state)
        out[seq] = o.to(out.dtype)
        if commits:
            ssm_state[index] = state.mT.to(ssm_state.dtype)
        else:
            ring.keys[row, pending] = k[:: heads[1] // heads[0]]
            ring.errors[row, pending] = error
            ring.decays[row, pending] = decay


def commit(rings: RingStack, entries: Tensor) -> None:
    """See `Kernels.gdn_commit`."""
    for i, state in enumerate(rings.states):
        for row, pending, index, _ in entries.tolist():
            state[index] = _replay(state[index], rings.layer(i), row, pending)


def _replay(stored: Tensor, ring: DecodeRing, row: int, pending: int) -> Tensor:
    """`stored [v heads, dv, dk]` after a row's pending tokens, rounded after each as a write is."""
    group = ring.errors.shape[2] // ring.keys.shape[2]
    for i in range(pending):
        k = ring.keys[row, i].repeat_interleave(group, dim=0)
        state = stored.to(k.dtype) * ring.decays[row, i][:, None, None]
        stored = (state + ring.errors[row, i][:, :, None] * k[:, None, :]).to(stored.dtype)
    return stored
