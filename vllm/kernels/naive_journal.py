# SPDX-License-Identifier: Apache-2.0
"""What references of decodes that keep a journal (`vllm.kernels.journal`) share."""

import torch
from torch import Tensor

from vllm.kernels.journal import Journal, JournalStack
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


def commit(stack: JournalStack, entries: Tensor) -> None:
    """Write a group's pending tokens to their blocks: see `gdn_commit`."""
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
        if journal.log_rates is not None:
            decay = element_decay(journal.log_rates, decay)
        else:
            decay = decay[:, None, None] if decay.dim() == 1 else decay[:, None, :]
        state = stored.to(k.dtype) * decay
        stored = (state + journal.errors[row, place][:, :, None] * k[:, None, :]).to(stored.dtype)
    return stored


def element_decay(log_rates: Tensor, dt: Tensor) -> Tensor:
    """`log_rates [heads * dv, dk]`, step sizes `dt [heads, dv]` -> `[heads, dv, dk]`."""
    rates = -log_rates.to(dt.dtype).exp().unflatten(0, dt.shape)
    return (rates * dt[:, :, None]).exp()
