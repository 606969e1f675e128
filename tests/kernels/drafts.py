# SPDX-License-Identifier: Apache-2.0
"""Decodes of a recurrent layer with drafts of which some are wrong, against token by token."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor
from typing_extensions import Self

from tests.kernels.guard_pages import before_a_guard_page
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import JournalMemory, JournalShape, JournalSize, JournalStack

#: tokens after which a row commits
INTERVAL = 3


class DraftedDecoder(ABC):
    """One layer's sequences, which decode given tokens. Their blocks are `indices [sequences]`."""

    kernels: Kernels
    indices: Tensor
    num_seqs: int
    conv_state: Tensor
    state: Tensor

    @abstractmethod
    def copy(self) -> Self:
        """The same with states of its own."""

    @abstractmethod
    def tokens(self, count: int) -> list[Tensor]:
        """Projections of tokens of every sequence: `[tokens, sequences, ...]` each."""

    @abstractmethod
    def decode(
        self, tokens: list[Tensor], indices: Tensor, stack: JournalStack | None = None
    ) -> Tensor:
        """Outputs of projections `[rows, ...]`, equally many rows of each sequence."""

    @abstractmethod
    def commit(self, stack: JournalStack, entries: Tensor) -> None:
        """Write what is pending."""

    @abstractmethod
    def journal_shape(self) -> JournalShape:
        """What a token takes in the journal."""

    def log_rates(self) -> list[Tensor]:
        """See `JournalStack`."""
        return []

    def states(self) -> list[Tensor]:
        used = self.indices.long()
        return [self.conv_state[used], self.state[used]]

    def stack(self, width: int) -> JournalStack:
        """A journal full of NaN, in which nothing is pending."""
        size, device = JournalSize(INTERVAL - 1 + width - 1, width), self.indices.device
        memory = JournalMemory.create(self.journal_shape(), 1, self.num_seqs, size, device)
        if device.type == "cpu":
            memory = JournalMemory(*map(before_a_guard_page, memory.tensors))
        for tensor in memory.tensors:
            tensor.fill_(torch.nan)
        zeros = [torch.zeros(self.num_seqs, dtype=torch.int32, device=device) for _ in "123"]
        steps = torch.zeros(self.num_seqs, 4, dtype=torch.int32, device=device)
        pending, first, taken = zeros
        states, rates = ([self.state], [self.conv_state]), self.log_rates()
        return memory.stack(steps, (pending, first, taken), *states, rates)


def verify(
    decoder: DraftedDecoder, tokens: list[Tensor], width: int
) -> dict[tuple[int, int], Tensor]:
    """Outputs by sequence and token of decoding `tokens` with drafts, of which a random number are
    right, while rows commit at random; nothing is pending at the end."""
    rng, stack, n = random.Random(width), decoder.stack(width), decoder.num_seqs
    most, places = INTERVAL - 1 + width - 1, stack.keys.shape[2]
    done, found = [0] * n, {}
    device = decoder.indices.device
    while min(done) < len(tokens[0]):
        now = 1 if rng.random() < 0.2 else width
        right = [min(rng.randint(1, now), len(tokens[0]) - d) for d in done]
        active = [count > 0 for count in right]
        rows = [torch.randn(n * now, *x.shape[2:]).to(x) for x in tokens]
        for i in range(n):
            pending, first = int(stack.pending[i]), int(stack.first[i])
            commits = int(rng.random() < 0.3 or pending + now > most)
            if not active[i]:
                continue
            stack.steps[i] = torch.tensor([i, pending, commits, first])
            stack.first[i] = (first + pending) % places if commits else first
            stack.pending[i] = right[i] - 1 if commits else pending + right[i]
            for mine, given in zip(rows, tokens, strict=True):
                mine[i * now : i * now + right[i]] = given[done[i] : done[i] + right[i], i]
        indices = torch.where(torch.tensor(active, device=device), decoder.indices, -1)
        out = decoder.decode(rows, indices, stack)
        for i in range(n):
            found |= {(i, done[i] + t): out[i * now + t] for t in range(right[i])}
            done[i] += right[i]
            if active[i]:
                stack.taken[i] = right[i] - 1
    entries = [[i, int(index)] for i, index in enumerate(decoder.indices)]
    decoder.commit(stack, torch.tensor(entries, dtype=torch.int32, device=device))
    return found


def difference(decoder: DraftedDecoder, width: int, length: int = 9) -> float:
    """The largest that drafts make to outputs and states, relative to the largest value of each;
    NaN if anything was left unwritten."""
    tokens, plain = decoder.tokens(length), decoder.copy()
    found = verify(decoder, tokens, width)
    pairs: list[tuple[Tensor, Tensor]] = []
    for t in range(length):
        out = plain.decode([x[t] for x in tokens], plain.indices)
        pairs += [(out[i], found[i, t]) for i in range(decoder.num_seqs)]
    pairs += zip(decoder.states(), plain.states(), strict=True)
    # Python's max would pass over NaN.
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())


def shift_a_count(
    monkeypatch: pytest.MonkeyPatch, decoder_class: type[DraftedDecoder], name: str
) -> None:
    """Decodes with a journal are told one too few of the first row's `pending`, `taken` or `first`,
    or one where there is none."""
    decode = decoder_class.decode

    def shifted(
        self: DraftedDecoder,
        tokens: list[Tensor],
        indices: Tensor,
        stack: JournalStack | None = None,
    ) -> Tensor:
        if stack is not None:
            column = {"pending": 1, "first": 3}.get(name)
            counts = stack.taken if column is None else stack.steps[:, column]
            counts[0] = max(int(counts[0]) - 1, 0) if counts[0] else 1
        return decode(self, tokens, indices, stack)

    monkeypatch.setattr(decoder_class, "decode", shifted)
