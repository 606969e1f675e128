# SPDX-License-Identifier: Apache-2.0
"""Loads are checked where they arrive, and whoever waits for a transfer is woken by its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.offload_engines import (
    connector_of,
    core_of,
    drain,
    engine,
    evict_device,
    offloading,
    prompt,
    run,
    tokens,
    worker_connector_of,
)
from vllm import decisions
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import arrival
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.host_memory import HostMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    LoadJob,
    MovedBlock,
    StoreJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.transfers import Transfers, _Parts
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import ArenaPlan, GroupPlan

#: states with padding, and four blocks of attention per page
PLAN = ArenaPlan(5120, 12, (GroupPlan(1, 5000, {}), GroupPlan(4, 1280, {})))
#: group, device block, host block
PLACES = [(0, 3, 2), (1, 16, 12), (1, 17, 13), (1, 31, 5), (0, 9, 4)]


def moved(places: list[tuple[int, int, int]]) -> list[MovedBlock]:
    return [MovedBlock(*place, None) for place in places]


#: a transfer of the module's newest `Transfers` has ended
ended = threading.Event()


def wait_for_reports() -> None:
    assert ended.wait(60)
    ended.clear()


def make_transfers(device: str = "cpu") -> tuple[torch.Tensor, Transfers]:
    """An arena of random bytes, and its transfers, which have stored `PLACES`."""
    arena = torch.randint(256, (12 * 5120,), dtype=torch.uint8, device=device)
    host = HostMemory(PLAN, 6, pinned=device == "cuda")
    transfers = Transfers(arena, PLAN, host, None, ended.set)
    transfers.store(StoreJob(1, moved(PLACES)))
    wait_for_reports()
    assert not transfers.take_stored()[0][1].failed
    return arena, transfers


def loaded(transfers: Transfers, places: list[tuple[int, int, int]]) -> set[int]:
    """Which of the blocks arrived broken."""
    transfers.load(LoadJob("a", moved(places)))
    wait_for_reports()
    return transfers.take_loaded()["a"]


def contents(arena: torch.Tensor) -> list[torch.Tensor]:
    spans = [(block * PLAN.block_stride(g), PLAN.groups[g].block_bytes) for g, block, _ in PLACES]
    return [arena[start : start + size].cpu() for start, size in spans]


def check_loads(device: str) -> None:
    """Blocks come back bit by bit; one that is broken in host memory, at either end, is found."""
    arena, transfers = make_transfers(device)
    expected = [block.clone() for block in contents(arena)]
    arena.zero_()
    assert loaded(transfers, PLACES) == set()
    assert all(map(torch.equal, contents(arena), expected))
    for i, (group, _, block) in enumerate(PLACES):
        data = transfers._host.block(group, block)
        for at in (0, -1):
            data[at] ^= 1
            assert loaded(transfers, PLACES) == {i}
            data[at] ^= 1
    assert loaded(transfers, PLACES) == set()
    transfers.close()


def test_loads_are_checked() -> None:
    check_loads("cpu")


def test_what_breaks_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is as it was sealed, and the arena gets something else."""
    arena, transfers = make_transfers()
    copy = transfers._copy

    def breaks(blocks: list[MovedBlock], *arguments: Any, **options: Any) -> None:
        copy(blocks, *arguments, **options)
        if moved(PLACES)[2] in blocks:
            arena[17 * 1280 + 5] ^= 1

    monkeypatch.setattr(transfers, "_copy", breaks)
    assert loaded(transfers, PLACES) == {2}
    transfers.close()


def test_a_part_is_a_share_of_bytes_or_one_block() -> None:
    _, transfers = make_transfers()
    blocks = moved(PLACES)
    assert transfers._split(blocks, 2**20, 1) == [[0, 4, 1, 2, 3]], "the largest come first"
    assert transfers._split(blocks, 3000, 1) == [[0], [4], [1, 2], [3]]
    assert transfers._split(blocks, 2**20, 5) == [[0], [4], [1, 2], [3]]
    transfers.close()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], []),
        ([[5, 6], [7], [8]], [[[5, 6], [7]], [[8]]]),
        ([[1, 2, 3, 4, 5, 6, 7], [8, 9]], [[[1, 2, 3]], [[4, 5, 6]], [[7], [8, 9]]]),
    ],
)
def test_a_thread_gets_as_many_blocks_as_the_device_takes(parts: Any, expected: Any) -> None:
    assert arrival._grouped(parts, 3) == expected


@pytest.mark.parametrize(
    ("sizes", "why"),
    [((5000, 240), "more than 240"), ((5000, 2**28 + 1), f"{2**28 + 1} bytes, the device takes")],
)
def test_some_blocks_are_checked_on_the_host(sizes: tuple[int, ...], why: str) -> None:
    with decisions.DecisionLog().current():
        assert not arrival._device_makes_digests(sizes)
        (found,) = (d for d in decisions.decisions() if d.what == "digests of loaded state")
    assert found.chosen == "on the host" and why in found.why


@pytest.mark.parametrize("largest", [5000, 2**26, 2**27 + 5, 2**28])
def test_device_memory_of_checks_is_planned(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For blocks of any size that the device checks."""
    asked: list[tuple[int, int]] = []

    def sealer(device: torch.device, num_bytes: int, smallest: int, num_spans: int) -> None:
        asked.append((num_bytes, num_spans))

    monkeypatch.setattr(arrival, "DeviceSealer", sealer)
    plan = ArenaPlan(largest, 2, (GroupPlan(1, largest, {}), GroupPlan(4, 1280, {})))
    arrival._DeviceCheck(torch.zeros(1), plan, lambda num_bytes, seconds: None)
    [(num_bytes, num_spans)] = asked
    config: Any = None
    planned = OffloadingConnector.device_bytes(config, "cuda")
    assert num_bytes >= largest and num_bytes // 16 + num_spans * 32 <= planned
    assert planned == 2**28 // 16 + 2**16 * 32
    assert OffloadingConnector.device_bytes(config, "cpu") == 0


def test_digests_of_the_device_count_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, float]] = []

    class Sealer:
        def digests_in_parts(self, data: Any, spans: Any, bring: Any, timed: Any) -> list[int]:
            timed(0.25)
            return [7 for part in spans for _ in part]

    monkeypatch.setattr(arrival, "DeviceSealer", lambda *arguments: Sealer())
    check = arrival._DeviceCheck(torch.zeros(1), PLAN, lambda *one: counted.append(one))
    assert check.digests([moved(PLACES[:2]), moved(PLACES[2:])], lambda part: None) == [7] * 5
    assert counted == [(2 * 5000 + 3 * 1280, 0.25)]


@pytest.mark.parametrize("lost", [False, True])
def test_a_load_that_fails_ends_after_its_copies(lost: bool) -> None:
    """They go on when the digests fail, and the blocks get other owners when the load ends."""
    _, transfers = make_transfers()
    seen: list[Any] = []

    class Stream:
        def synchronize(self) -> None:
            seen.append("copies are there")
            if lost:
                raise RuntimeError("the device is lost")

    class Check:
        def digests(self, parts: Any, bring: Any) -> list[int]:
            bring(0)
            raise RuntimeError("no digests")

    made: Any = Stream(), Check(), lambda *arguments, **options: seen.append("launched")
    transfers._in, transfers._check, transfers._copy = made  # type: ignore[method-assign]
    transfers._fill(LoadJob("a", moved(PLACES)), [[0, 1], [2]], _Parts(1, seen.append))
    assert seen == ["launched", "copies are there", {0, 1, 2}]
    transfers._in = None
    transfers.close()


def test_the_end_of_a_transfer_is_told_when_there_is_a_report() -> None:
    _, transfers = make_transfers()
    assert not ended.wait(0.05), "nothing goes on"
    transfers.load(LoadJob("a", moved(PLACES)))
    wait_for_reports()
    assert transfers.take_loaded() == {"a": set()}
    transfers.close()


@pytest.mark.slow
def test_the_core_does_not_pause_once_state_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request is loaded the core's steps wait in the worker, and the step after the one
    that reports it computes."""
    with engine(offloading()) as llm:
        expected = tokens(run(llm, prompt(1, 70)))
        evict_device(llm)
        core, connector, seen = core_of(llm), worker_connector_of(llm), []
        schedule, wait = core.scheduler.schedule, connector.wait_for_transfers

        def scheduled() -> Any:
            output = schedule()
            seen.append(output.total_num_scheduled_tokens)
            return output

        def waited(timeout_s: float) -> None:
            assert not seen[-1] and core.scheduler.transfer.loading
            seen.append("waits")
            wait(30)  # a hang, unless the end of the load is told

        monkeypatch.setattr(core.scheduler, "schedule", scheduled)
        monkeypatch.setattr(connector, "wait_for_transfers", waited)
        assert tokens(run(llm, prompt(1, 70), max_tokens=1)) == [expected[0][:1]]
        monkeypatch.undo()
        assert seen[:3] == [0, "waits", 1]
        drain(llm)


@pytest.mark.slow
def test_what_was_loaded_is_not_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has it: the scheduler does not even look. What broke there is stored anew."""
    with engine(offloading(), "llama") as llm:
        stores, sent = connector_of(llm)._scheduling.stores, []
        to_store = stores._to_store

        def counted(place: Any, contents: list[Any], blocks: list[Any]) -> Any:
            sent.append(len(contents))
            return to_store(place, contents, blocks)

        def answered() -> list[list[int]]:
            answer = tokens(run(llm, prompt(1, 70), max_tokens=1))
            evict_device(llm)
            return answer

        monkeypatch.setattr(stores, "_to_store", counted)
        expected = answered()
        assert sent == [1] * 4
        assert answered() == expected and sent == [1] * 4
        worker_connector_of(llm)._transfers._host.buffer.zero_()
        assert answered() == expected and sent == [1] * 8
        assert not stores._loaded
