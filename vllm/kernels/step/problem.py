# SPDX-License-Identifier: Apache-2.0
"""The arguments of `prepare`, which begins a step, and of `accept`, which ends it.

A step has `num_decodes` requests of `width` tokens each, then prefills of any length. A decode's
tokens are the newest one its row has, which no step has computed, and drafts that follow it. The
host knows an upper bound of what a row has computed; the device knows the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: columns of `PrepareProblem.requests`
ROW, START, COUNT, FIRST_TOKEN = range(4)
#: columns of `AcceptProblem.requests`
ACCEPT_ROW, ACCEPT_FIRST, ACCEPT_COUNT, ACCEPT_JOURNALS = range(4)
#: `START` of a request whose count of computed tokens is in `Progress`
ON_DEVICE = -1
#: tokens of a row that end its output and that the device knows
STOPS = 8
#: `Progress.ended` of a row that goes on after its `stops`
NEVER_ENDS = -1
#: columns of both tables, and of `PrepareProblem.journal_steps`
COLUMNS = 4


@dataclass(frozen=True)
class Progress:
    """What the device knows of each batch row.

    `computed [rows]` int32: tokens whose state is in memory. `tokens [rows, width]` int64: the
    newest token, which is not computed, and the drafts that follow it; `num_drafts [rows]` int32
    of them. Of recurrent layers' journals (`vllm.kernels.journal`), all `[rows]` int32: `pending`
    tokens that are not in the state's block, in places from `first` on, and `taken` drafts of the
    row's last step that were accepted, whose inputs the convolution's state has not taken in.
    `stops [rows, STOPS]` int64: tokens that end the row's output, -1 for none. `ended [rows]`
    int32: 1 where the newest token does and no step computes it, else 0, or `NEVER_ENDS`.
    """

    computed: Tensor
    tokens: Tensor
    num_drafts: Tensor
    pending: Tensor
    first: Tensor
    taken: Tensor
    stops: Tensor
    ended: Tensor

    @classmethod
    def create(cls, rows: int, width: int, device: torch.device) -> Progress:
        """Of rows that have computed nothing."""

        def counts() -> Tensor:
            return torch.zeros(rows, dtype=torch.int32, device=device)

        tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        stops = torch.full((rows, STOPS), -1, dtype=torch.int64, device=device)
        return cls(counts(), tokens, counts(), counts(), counts(), counts(), stops, counts())

    @property
    def width(self) -> int:
        """The most tokens of a row that a step verifies."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class PagedSlots:
    """Where a paged group's tokens go: `block_table [requests, blocks]` int32 of the step's
    requests, of which a step fills what it needs, `slots [tokens]` int64 to fill. Both stay at
    their address from step to step."""

    block_table: Tensor
    block_size: int
    slots: Tensor


@dataclass(frozen=True)
class PagedGroups:
    """All paged groups, and of recurrent ones the blocks of the step's decodes: `states`, each
    `[requests]` int32, where a step puts -1 for those that have ended. For CUDA, on the device,
    both int64: `descriptors [groups, 4]`, addresses of block table and slots, blocks between rows
    of the table, block size; `state_addresses [states]`."""

    groups: Sequence[PagedSlots]
    descriptors: Tensor
    states: Sequence[Tensor]
    state_addresses: Tensor

    @classmethod
    def of(
        cls, groups: Sequence[PagedSlots], device: torch.device, states: Sequence[Tensor] = ()
    ) -> PagedGroups:
        rows = [
            (g.block_table.data_ptr(), g.slots.data_ptr(), g.block_table.stride(0), g.block_size)
            for g in groups
        ]
        table = torch.tensor(rows, dtype=torch.int64).view(len(rows), 4)
        addresses = torch.tensor([blocks.data_ptr() for blocks in states], dtype=torch.int64)
        return cls(groups, table.to(device), states, addresses.to(device))


@dataclass(frozen=True)
class JournalCommits:
    """When recurrent states are written back (`vllm.kernels.journal`).

    `steps [requests, 4]` int32 to fill for the decodes: batch row, pending tokens, whether this
    step commits, place of the first pending token. A row has `places`, and commits in step
    `turn` if `(turn + row) % interval == 0`, or if else more than `most_pending` tokens would wait.
    """

    steps: Tensor
    places: int
    most_pending: int
    interval: int
    turn: int


@dataclass(frozen=True)
class PrepareProblem:
    """Makes a step's arrays from `progress` and what the host knows, and begins to advance it.

    `requests [requests, 4]` int32, padding included: batch row (-1: padding), tokens computed
    before (`ON_DEVICE`: as `progress` has it), tokens that count (of a decode at most `width`; the
    others are computed and never accepted), and the request's first token in the step. The first
    `num_requests` are real, `num_tokens` tokens are theirs.

    Fills, of every token: `positions [tokens]`, `next_positions [tokens]` (one more) and the slots
    of each group; of tokens that only the device knows `input_ids [tokens]`, all int64; of every
    request `seq_lens [requests]` int32, the positions that its last token sees. Padding has
    position, id and length 0 and slot -1, and so has what lies past `max_model_len`; a token whose
    block is the null block has slot -1. Tokens that do not count have slots wherever there are
    blocks: the others of their request read them, masked, and must not find what is no number.

    `progress.computed` counts each prefill's tokens and the first of each decode, which is
    verified, from here on; so does `progress.pending` of decodes. `accept` adds the drafts. Rows
    whose computed tokens are given have nothing pending: their states were written back.

    A decode that `progress` says has ended is padding, but for its `seq_lens`: it computes nothing
    that is kept, and nothing of it advances. A row whose computed tokens are given goes on.
    """

    progress: Progress
    requests: Tensor
    num_requests: int
    num_decodes: int
    width: int
    num_tokens: int
    input_ids: Tensor
    positions: Tensor
    next_positions: Tensor
    seq_lens: Tensor
    max_model_len: int
    groups: PagedGroups
    journal: JournalCommits | None = None


@dataclass(frozen=True)
class AcceptProblem:
    """Verifies drafts by the tokens sampled after each, and keeps the newest token of each row.

    `requests [requests, 4]` int32: batch row, place of the first of its samples in `sampled
    [samples]` int64, samples that count, and whether the row keeps a journal. Sample `i` follows
    token `i` of the row in this step; draft `i + 1` is accepted if it is that sample, all drafts
    before it are, and it does not end the output: what follows would be dropped by the host, and
    the state at the end could not be kept.

    `counts [2, requests]` int32 becomes, of each request, the number of samples that are output
    (the accepted drafts and the token after them), and the number of drafts that were verified.

    With `ends` a row whose newest token is one of its `stops` has ended from here on: what a step
    that was launched since computes of it is nobody's, and its one sample is not output.
    """

    progress: Progress
    requests: Tensor
    sampled: Tensor
    counts: Tensor
    ends: bool = False
