# SPDX-License-Identifier: Apache-2.0
"""What ranks that share layers do alike at the start, whatever their clocks and caches say."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.parallel_state import as_first_rank_of, get_tp_group
from vllm.v1.worker import warm_up


def test_noting_kernels_asks_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows its kernels from an earlier start does not run the layers."""
    summed: list[torch.Tensor] = []

    def rehearse(runner: Any, decode_known_tokens: bool) -> None:
        summed.append(get_tp_group().all_reduce(torch.ones(2)))

    monkeypatch.setattr(warm_up, "bind_small_arena", lambda runner: None)
    monkeypatch.setattr(warm_up, "_rehearse", rehearse)
    runner: Any = SimpleNamespace(
        placed=[0], use_placement=lambda index: None, release_kv_cache=lambda: None
    )
    with as_first_rank_of(2):
        assert warm_up.note_kernels(runner) == []
        assert [one.shape for one in summed] == [(2,)]
        with pytest.raises(ValueError):  # outside of it they communicate: there is no group
            rehearse(runner, False)


class _Graphs:
    num_pending = 5

    def capture_next(self) -> bool:
        self.num_pending -= 1
        return True


def test_ranks_capture_equally_much_before_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have time left for two sizes, this one for all."""
    votes: list[bool] = []

    def all_agree(mine: bool) -> bool:
        votes.append(mine)
        return mine and len(votes) <= 2

    monkeypatch.setattr(warm_up, "get_tp_group", lambda: SimpleNamespace(all_agree=all_agree))
    graphs: Any = _Graphs()
    warm_up.capture_until(graphs, time.monotonic() + 600)
    assert votes == [True] * 3 and graphs.num_pending == 3


def test_a_rank_without_time_votes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    votes: list[bool] = []
    group = SimpleNamespace(all_agree=lambda mine: votes.append(mine) or mine)
    monkeypatch.setattr(warm_up, "get_tp_group", lambda: group)
    graphs: Any = _Graphs()
    warm_up.capture_until(graphs, time.monotonic() - 1)
    assert votes == [False] and graphs.num_pending == 5
