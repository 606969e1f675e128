# SPDX-License-Identifier: Apache-2.0
"""Which rows are flushed before whom, and what `prepare` is told of commits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.kernels.journal import Journal, JournalShape, JournalSize, JournalStack
from vllm.kernels.step import JournalCommits, Progress
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, KeepsJournal
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.journal_pool import JournalCounts, JournalPool
from vllm.v1.worker.state_journals import StateJournals

ROWS, INTERVAL, WIDTH = 6, 4, 3
GROUPS = (1, 3)
SHAPE = JournalShape(1, 2, 4, 4, torch.float32, channels=16)
SPEC = MambaSpec(64, ((3, 16), (2, 4, 4)), (torch.float32, torch.float32))


class Layer(KeepsJournal):
    def __init__(self) -> None:
        self.kv_cache = (torch.zeros(9, 3, 16), torch.zeros(9, 2, 4, 4))

    def journal_shape(self, spec: MambaSpec) -> JournalShape:
        return SHAPE

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        return SPEC

    def commit(self, stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.gdn_commit(stack, entries)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return GDNAttentionBackend


class Flushes:
    """Stands for the platform's kernels: keeps what it was told to write."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[list[int]]]] = []

    def gdn_commit(self, stack: JournalStack, entries: Tensor) -> None:
        self.calls.append((len(stack.states), entries.tolist()))

    def take(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> Flushes:
    kernels = Flushes()
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    return kernels


def pool(size: JournalSize | None, num_layers: int) -> JournalPool:
    made = JournalPool(size, ROWS, torch.device("cpu"))
    made.reserve(JournalCounts({SHAPE: num_layers}))
    return made


@pytest.fixture
def journals() -> StateJournals:
    """Two groups, of one and of two layers; row `r` has blocks `r + 1` and `r + 3` in them."""
    layers = [[Layer()], [Layer(), Layer()]]
    progress = Progress.create(ROWS, WIDTH, torch.device("cpu"))
    size = JournalSize.of(INTERVAL, WIDTH)
    assert size is not None
    groups = [(group, members, SHAPE) for group, members in zip(GROUPS, layers, strict=True)]
    made = StateJournals(groups, progress, pool(size, 3), INTERVAL, depth=2)
    tables = [SimpleNamespace(table=np.zeros((ROWS, 1), dtype=np.int32)) for _ in range(4)]
    for group, first in zip(GROUPS, (1, 3), strict=True):
        tables[group].table[:, 0] = np.arange(ROWS) + first
    made.bind(SimpleNamespace(groups=tables))  # type: ignore[arg-type]
    made.layers = layers  # type: ignore[attr-defined]
    return made


def step(
    journals: StateJournals,
    decodes: list[int],
    given: tuple[int, ...] = (),
    commit_all: bool = False,
) -> JournalCommits:
    """A step of rows that go on and of rows whose progress the host gives."""
    rows = np.array([*decodes, *given], dtype=np.int64)
    known = np.array([0] * len(decodes) + [9] * len(given))
    order = SimpleNamespace(
        rows=rows, num_decodes=len(decodes), num_computed=np.full(len(rows), 5), num_known=known
    )
    return journals.begin_step(order, commit_all)  # type: ignore[arg-type]


def wait(journals: StateJournals, *rows: int) -> None:
    journals.waiting[list(rows)] = True


def bound(journals: StateJournals) -> Journal:
    journal = journals.layers[1][1].journal  # type: ignore[attr-defined]
    assert journal is not None
    return journal


# ---- what `prepare` is told ----------------------------------------------------------------------


def test_turns_follow_the_steps_and_places_the_size(journals: StateJournals) -> None:
    told = [step(journals, [0, 1]) for _ in range(3)]
    assert [commits.turn for commits in told] == [1, 2, 3]
    assert {(c.interval, c.most_pending, c.places) for c in told} == {(INTERVAL, 5, 7)}
    assert step(journals, [0], commit_all=True).interval == 1
    assert journals.no_step().turn == 4
    assert bound(journals).steps.data_ptr() == told[0].steps.data_ptr()


def test_one_token_and_every_step_need_no_journal() -> None:
    assert JournalSize.of(1, 1) is None
    assert JournalSize.of(1, 4) == JournalSize(3, 4)
    assert JournalSize.of(6, 1) == JournalSize(5, 1)


# ---- who is flushed ------------------------------------------------------------------------------


def test_a_request_that_leaves_is_flushed_once_into_the_block_it_had(
    journals: StateJournals, flushes: Flushes
) -> None:
    wait(journals, 2, 4)
    journals.leave(2)
    journals.leave(3)
    for table in journals._tables:
        table[:, 0] = 8
    assert not flushes.calls
    journals.before_copies([])
    assert flushes.take() == [(1, [[2, 3]]), (2, [[2, 5]])]
    journals.before_copies([])
    assert not flushes.calls and np.flatnonzero(journals.waiting).tolist() == [4]


def test_blocks_are_complete_before_they_are_copied(
    journals: StateJournals, flushes: Flushes
) -> None:
    """A row that goes on starts with nothing pending, which only the device counts."""
    wait(journals, 0, 1, 5)
    counts = (journals._progress.pending, journals._progress.first, journals._progress.taken)
    for count in counts:
        count.fill_(3)
    journals.before_copies([BlockCopy(0, 1, 7), BlockCopy(GROUPS[0], 2, 8), BlockCopy(2, 3, 7)])
    assert flushes.take() == [(1, [[1, 2]]), (2, [[1, 4]])]
    assert all(count.tolist() == [3, 0, 3, 3, 3, 3] for count in counts)
    journals.before_copies([BlockCopy(GROUPS[1], 8, 7), BlockCopy(GROUPS[1], 4, 7)])
    assert flushes.take() == [(1, [[5, 6]]), (2, [[5, 8]])]
    assert np.flatnonzero(journals.waiting).tolist() == [0]


def test_a_row_whose_progress_is_given_is_flushed_first(
    journals: StateJournals, flushes: Flushes
) -> None:
    wait(journals, 1, 3)
    step(journals, [3], given=(0, 1))
    assert flushes.take() == [(1, [[1, 2]]), (2, [[1, 4]])]
    assert np.flatnonzero(journals.waiting).tolist() == [3]


def test_who_reads_all_states_finds_idle_rows_complete(
    journals: StateJournals, flushes: Flushes
) -> None:
    """Rows of the step commit in it; those that do not run are flushed, and so are all where no
    step runs."""
    wait(journals, 1, 3, 4)
    journals._progress.pending.fill_(2)
    step(journals, [3], commit_all=True)
    assert flushes.take() == [(1, [[1, 2], [4, 5]]), (2, [[1, 4], [4, 7]])]
    assert np.flatnonzero(journals.waiting).tolist() == [3]
    assert journals._progress.pending.tolist() == [2, 0, 2, 2, 0, 2]
    journals.complete_all()
    assert flushes.take() == [(1, [[3, 4]]), (2, [[3, 6]])]
    assert not journals.waiting.any() and journals._progress.pending[3] == 0
    journals.complete_all()
    assert not flushes.calls


def test_made_up_requests_have_nothing_to_keep(journals: StateJournals, flushes: Flushes) -> None:
    """Their block is the null block, which must stay as it is."""
    journals._tables[0][2] = journals._tables[1][2] = 0
    wait(journals, 2)
    journals.leave(2)
    journals.before_copies([])
    assert not flushes.calls and not journals.waiting.any()


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_taken_once_and_survives_a_new_arena(journals: StateJournals) -> None:
    expected = 3 * ROWS * (7 * SHAPE.token_bytes + 2 * SHAPE.input_bytes)
    assert sum(t.nbytes for t in journals.tensors) == expected
    address = bound(journals).keys.data_ptr()
    wait(journals, 1)
    journals._progress.pending.fill_(2)
    journals.unbind()
    assert all(layer.journal is None for group in journals.layers for layer in group)  # type: ignore[attr-defined]
    journals.bind(SimpleNamespace(groups=[SimpleNamespace(table=np.ones((ROWS, 1)))] * 4))  # type: ignore[arg-type]
    assert bound(journals).keys.data_ptr() == address
    assert not journals.waiting.any() and not journals._progress.pending.any()


def test_a_rehearsed_flush_names_the_null_block(journals: StateJournals, flushes: Flushes) -> None:
    step(journals, [0, 1])
    waiting = journals.waiting.copy()
    journals.rehearse()
    assert flushes.take() == [(1, [[0, 0]]), (2, [[0, 0]])]
    assert np.array_equal(journals.waiting, waiting) and waiting.any()


@pytest.mark.parametrize("tokens", [1, 4])
def test_drafts_need_a_journal(tokens: int) -> None:
    """A recurrent layer of a plug-in may have none."""
    cache = SimpleNamespace(commit_interval=1)
    scheduler = SimpleNamespace(max_num_seqs=ROWS)
    config: Any = SimpleNamespace(
        cache_config=cache, scheduler_config=scheduler, tokens_to_verify=tokens
    )
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=SPEC)
    groups: Any = SimpleNamespace(kv_cache_groups=[group])
    layers: Any = {"a": SimpleNamespace(), "b": Layer()}
    progress = Progress.create(ROWS, tokens, torch.device("cpu"))
    if tokens == 1:
        assert StateJournals.create(config, layers, groups, progress, 2, pool(None, 1)) is None
        return
    with pytest.raises(ValueError, match="a: SimpleNamespace layers keep no journal"):
        StateJournals.create(config, layers, groups, progress, 2, pool(None, 1))


def test_placements_take_turns_in_a_pool() -> None:
    """Each group has places of its own in it; what is there stays as long as it is enough."""
    size = JournalSize(2, 3)
    made = pool(size, 3)
    assert made.has_room_for(JournalCounts({SHAPE: 3}))
    assert not made.has_room_for(JournalCounts({SHAPE: 4}))
    assert not made.has_room_for(JournalCounts({replace(SHAPE, channels=8): 1}))
    first, second = made.parts([(SHAPE, 1), (SHAPE, 2)])
    (other,) = made.parts([(SHAPE, 3)])
    assert (len(first.keys), len(second.keys)) == (1, 2)
    assert other.keys.data_ptr() == first.keys.data_ptr() != second.keys.data_ptr()
    assert other.errors[1].data_ptr() == second.errors[0].data_ptr()
    made.reserve(JournalCounts({SHAPE: 2}))
    assert made.tensors[0].data_ptr() == other.keys.data_ptr() and len(made.tensors[0]) == 3
    made.release()
    assert made.tensors == [] and not made.has_room_for(JournalCounts({SHAPE: 1}))
    nothing = pool(None, 3)
    assert nothing.tensors == []


class OtherLayer(Layer):
    """Its pending tokens are written by another op."""

    def commit(self, stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.kda_commit(stack, entries)


class Stateful(AttentionLayerBase):
    """Has the state of the others, and no journal."""

    get_kv_cache_spec = Layer.get_kv_cache_spec
    get_attn_backend = Layer.get_attn_backend


@pytest.mark.parametrize(
    ("second", "drafts", "message"),
    [
        (OtherLayer, 0, r"b: Layer and OtherLayer layers .* `mamba_type` of its own"),
        (Stateful, 2, "b: Stateful layers keep no journal"),
    ],
)
def test_kinds_of_equal_states_in_one_group(
    second: type[AttentionLayerBase], drafts: int, message: str
) -> None:
    """One op writes the pending tokens of a whole group."""
    config: Any = SimpleNamespace(tokens_to_verify=1 + drafts)
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=SPEC)
    groups: Any = SimpleNamespace(kv_cache_groups=[group])
    progress = Progress.create(ROWS, 1 + drafts, torch.device("cpu"))
    layers: Any = {"a": Layer(), "b": second()}
    with pytest.raises(ValueError, match=message):
        StateJournals.create(config, layers, groups, progress, 2, pool(None, 1))
