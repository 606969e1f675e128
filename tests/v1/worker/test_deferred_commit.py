# SPDX-License-Identifier: Apache-2.0
"""Which rows commit when, and what is flushed before whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.kernels.decode_ring import DecodeRing, RingShape, RingStack
from vllm.model_executor.layers.attention_layer_base import DefersCommit
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.deferred_commit import DeferredCommit

ROWS, INTERVAL = 6, 4
GROUPS = (1, 3)
SHAPE = RingShape(1, 2, 4, 4, torch.float32)
SPEC = MambaSpec(64, ((3, 16), (2, 4, 4)), (torch.float32, torch.float32))


class Layer(DefersCommit):
    def __init__(self) -> None:
        self.kv_cache = (torch.zeros(9, 3, 16), torch.zeros(9, 2, 4, 4))

    def ring_shape(self, spec: MambaSpec) -> RingShape:
        return SHAPE

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        return SPEC

    def get_attn_backend(self) -> type[AttentionBackend]:
        return GDNAttentionBackend


class Flushes:
    """Stands for the platform's kernels: keeps what it was told to write."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[list[int]]]] = []

    def gdn_commit(self, rings: RingStack, entries: Tensor) -> None:
        self.calls.append((len(rings.states), entries.tolist()))

    def take(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> Flushes:
    kernels = Flushes()
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    return kernels


@pytest.fixture
def deferred() -> DeferredCommit:
    """Two groups, of one and of two layers; row `r` has blocks `r + 1` and `r + 3` in them."""
    layers = [[Layer()], [Layer(), Layer()]]
    made = DeferredCommit(
        [(group, members, SPEC) for group, members in zip(GROUPS, layers, strict=True)],
        ROWS,
        INTERVAL,
        torch.device("cpu"),
        depth=2,
    )
    tables = [SimpleNamespace(table=np.zeros((ROWS, 1), dtype=np.int32)) for _ in range(4)]
    for group, first in zip(GROUPS, (1, 3), strict=True):
        tables[group].table[:, 0] = np.arange(ROWS) + first
    made.bind(SimpleNamespace(groups=tables))  # type: ignore[arg-type]
    made.layers = layers  # type: ignore[attr-defined]
    return made


def step(deferred: DeferredCommit, decodes: list[int], prefills: tuple[int, ...] = ()) -> list[Any]:
    """`[row, pending, commits]` of each decode as the kernels are told."""
    rows = np.array([*decodes, *prefills], dtype=np.int64)
    deferred.begin_step(SimpleNamespace(rows=rows, num_decodes=len(decodes)))  # type: ignore[arg-type]
    return ring(deferred).steps[: len(decodes), :3].tolist()


def ring(deferred: DeferredCommit) -> DecodeRing:
    bound = deferred.layers[1][1].decode_ring  # type: ignore[attr-defined]
    assert bound is not None
    return bound


# ---- who commits ---------------------------------------------------------------------------------


def test_every_row_commits_every_interval_and_rows_take_turns(deferred: DeferredCommit) -> None:
    rows = list(range(ROWS))
    told = [step(deferred, rows) for _ in range(5 * INTERVAL)]
    for before, after in zip(told, told[1:], strict=False):
        for (row, pending, commits), (same_row, then, _) in zip(before, after, strict=True):
            assert same_row == row and then == (0 if commits else pending + 1)
    commits = np.array([[c for _, _, c in one] for one in told])
    assert (commits.reshape(5, INTERVAL, ROWS).sum(1) == 1).all()
    assert set(commits.sum(1)) == {1, 2}
    assert ring(deferred).slots == INTERVAL - 1 >= max(p for one in told for _, p, _ in one)


def test_a_row_that_pauses_keeps_what_is_pending(deferred: DeferredCommit) -> None:
    told = []
    for i in range(24):
        told += step(deferred, [2] if i % 3 else [])
    pending = 0
    for row, count, commits in told:
        assert (row, count) == (2, pending) and count < INTERVAL
        assert commits or count < INTERVAL - 1
        pending = 0 if commits else count + 1


def test_the_address_of_the_steps_is_fixed(deferred: DeferredCommit) -> None:
    addresses = set()
    for _ in range(4):
        step(deferred, [0, 1])
        addresses.add(ring(deferred).steps.data_ptr())
    assert len(addresses) == 1
    first = deferred.layers[0][0].decode_ring  # type: ignore[attr-defined]
    assert first.steps.data_ptr() in addresses


# ---- who is flushed ------------------------------------------------------------------------------


def pend(deferred: DeferredCommit, **counts: int) -> None:
    for row, count in counts.items():
        deferred.pending[int(row[1:])] = count


def test_a_request_that_leaves_is_flushed_once_into_the_block_it_had(
    deferred: DeferredCommit, flushes: Flushes
) -> None:
    pend(deferred, r2=3, r4=1)
    deferred.leave(2)
    deferred.leave(3)
    for table in deferred._tables:
        table[:, 0] = 8
    assert not flushes.calls
    deferred.before_copies([])
    assert flushes.take() == [(1, [[2, 3, 3, 0]]), (2, [[2, 3, 5, 0]])]
    deferred.before_copies([])
    assert not flushes.calls and deferred.pending.tolist() == [0, 0, 0, 0, 1, 0]


def test_blocks_are_complete_before_they_are_copied(
    deferred: DeferredCommit, flushes: Flushes
) -> None:
    pend(deferred, r0=2, r1=1, r5=3)
    deferred.before_copies([BlockCopy(0, 1, 7), BlockCopy(GROUPS[0], 2, 8), BlockCopy(2, 3, 7)])
    assert flushes.take() == [(1, [[1, 1, 2, 0]]), (2, [[1, 1, 4, 0]])]
    deferred.before_copies([BlockCopy(GROUPS[1], 8, 7), BlockCopy(GROUPS[1], 4, 7)])
    assert flushes.take() == [(1, [[5, 3, 6, 0]]), (2, [[5, 3, 8, 0]])]
    assert deferred.pending.tolist() == [2, 0, 0, 0, 0, 0]


def test_a_row_is_flushed_before_a_prefill_continues_it(
    deferred: DeferredCommit, flushes: Flushes
) -> None:
    pend(deferred, r1=2, r3=1)
    step(deferred, [3], prefills=(0, 1))
    assert flushes.take() == [(1, [[1, 2, 2, 0]]), (2, [[1, 2, 4, 0]])]
    assert deferred.pending[1] == 0 and deferred.pending[3] in (0, 2)


def test_made_up_requests_have_nothing_to_keep(deferred: DeferredCommit, flushes: Flushes) -> None:
    """Their block is the null block, which must stay as it is."""
    deferred._tables[0][2] = deferred._tables[1][2] = 0
    pend(deferred, r2=3)
    deferred.leave(2)
    deferred.before_copies([])
    assert not flushes.calls and not deferred.pending.any()


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_taken_once_and_survives_a_new_arena(deferred: DeferredCommit) -> None:
    expected = 3 * ROWS * (INTERVAL - 1) * SHAPE.token_bytes
    assert sum(t.nbytes for t in deferred.tensors) == expected
    address = ring(deferred).keys.data_ptr()
    deferred.pending[1] = 2
    deferred.unbind()
    assert all(layer.decode_ring is None for group in deferred.layers for layer in group)  # type: ignore[attr-defined]
    deferred.bind(SimpleNamespace(groups=[SimpleNamespace(table=np.ones((ROWS, 1)))] * 4))  # type: ignore[arg-type]
    assert ring(deferred).keys.data_ptr() == address
    assert not deferred.pending.any()


def test_a_rehearsed_flush_writes_nothing(deferred: DeferredCommit, flushes: Flushes) -> None:
    step(deferred, [0, 1])
    pending = deferred.pending.copy()
    deferred.rehearse()
    assert flushes.take() == [(1, [[0, 0, 0, 0]]), (2, [[0, 0, 0, 0]])]
    assert np.array_equal(deferred.pending, pending) and pending.any()
