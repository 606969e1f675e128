# SPDX-License-Identifier: Apache-2.0
"""Plain torch decode that keeps a journal (`vllm.kernels.journal`)."""

import torch
from torch import Tensor

from vllm.kernels.journal import Journal, JournalStack
from vllm.kernels.naive_gdn import Gates, split_qkv
from vllm.model_executor.layers.fla.ops.gated_delta_rule.naive import naive_recurrent_step
from vllm.model_executor.layers.mamba.ops.causal_conv1d.naive import convolve


def convolve_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    journal: Journal,
    width: int,
) -> Tensor:
    """The convolution of `width` tokens per sequence and SiLU, `[tokens, channels]`.

    The state takes in the accepted drafts of the row's last step and this step's first token; the
    inputs of the others are kept."""
    mixed = torch.empty_like(x)
    for seq, index in enumerate(state_indices.tolist()):
        if index < 0:
            continue
        row = int(journal.steps[seq, 0])
        tokens = x[seq * width : (seq + 1) * width]
        taken = journal.inputs[row, : int(journal.taken[row])]
        past = torch.cat([conv_state[index], taken])[len(taken) :]
        mixed[seq * width : (seq + 1) * width] = convolve(torch.cat([past, tokens]), weight, bias)
        conv_state[index] = torch.cat([past, tokens[:1]])[1:]
        journal.inputs[row, : width - 1] = tokens[1:]
    return mixed


def decode(
    mixed: Tensor,
    gates: Gates,
    ssm_state: Tensor,
    state_indices: Tensor,
    journal: Journal,
    heads: tuple[int, int, int, int],
    out: Tensor,
    width: int,
) -> None:
    """See `Kernels.gdn_decode`; `mixed [tokens, channels]` is the convolution's output, `heads` are
    the last arguments of `split_qkv`.

    Raises:
        ValueError: a sequence has too few places for what is pending and this step's tokens.
    """
    for seq, index in enumerate(state_indices.tolist()):
        if index < 0:
            continue
        row, pending, commits, first = journal.steps[seq].tolist()
        check_places(journal, row, pending + width - commits)
        part = slice(seq * width, (seq + 1) * width)
        q, k, v = split_qkv(mixed[part], *heads)
        g, beta = gates(part)
        decay = g.exp()
        stored = replay(ssm_state[index], journal, row, first, pending)
        for t in range(width):
            state = stored.mT.to(q.dtype)
            step = (q[t] * heads[2] ** -0.5, k[t], v[t], decay[t], beta[t])
            o, error, state = naive_recurrent_step(*step, state)
            out[seq * width + t] = o.to(out.dtype)
            stored = state.mT.to(ssm_state.dtype)
            if commits and t == 0:
                ssm_state[index] = stored
                continue
            place = (first + pending + t - commits) % journal.places
            journal.keys[row, place] = k[t, :: heads[1] // heads[0]]
            journal.errors[row, place] = error
            journal.decays[row, place] = decay[t]


def commit(stack: JournalStack, entries: Tensor) -> None:
    """See `Kernels.gdn_commit`."""
    for i, (state, conv_state) in enumerate(zip(stack.states, stack.conv_states, strict=True)):
        journal = stack.layer(i)
        for row, index in entries.tolist():
            first, pending = int(stack.first[row]), int(stack.pending[row])
            state[index] = replay(state[index], journal, row, first, pending)
            taken = journal.inputs[row, : int(stack.taken[row])]
            conv_state[index] = torch.cat([conv_state[index], taken])[len(taken) :]


def check_places(journal: Journal, row: int, needed: int) -> None:
    """ValueError unless a row has so many places."""
    if needed > journal.places:
        raise ValueError(
            f"row {row} has {journal.places} places: there is no place for {needed} tokens"
        )


def replay(stored: Tensor, journal: Journal, row: int, first: int, pending: int) -> Tensor:
    """`stored [v heads, dv, dk]` after a row's pending tokens, rounded after each as a write is."""
    group = journal.errors.shape[2] // journal.keys.shape[2]
    for i in range(pending):
        place = (first + i) % journal.places
        k = journal.keys[row, place].repeat_interleave(group, dim=0)
        decay = journal.decays[row, place]
        decay = decay[:, None, None] if decay.dim() == 1 else decay[:, None, :]
        state = stored.to(k.dtype) * decay
        stored = (state + journal.errors[row, place][:, :, None] * k[:, None, :]).to(stored.dtype)
    return stored
