# SPDX-License-Identifier: Apache-2.0
"""Events count when every worker reports them."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
)


def stored(name: int) -> BlockStored:
    return BlockStored(
        block_hashes=[name],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="cpu",
        lora_name=None,
    )


def test_common_and_all_events() -> None:
    of_two = KVEventAggregator(2)
    of_two.add_events([stored(1), stored(1), BlockRemoved([5], "cpu")])
    assert of_two.get_common_events() == []
    of_two.add_events([AllBlocksCleared(), stored(1), BlockRemoved([5], None)])
    assert of_two.get_common_events() == [stored(1)]
    assert of_two.get_all_events() == [
        stored(1),
        BlockRemoved([5], "cpu"),
        AllBlocksCleared(),
        BlockRemoved([5], None),
    ]
    of_two.clear_events()
    assert of_two.get_all_events() == []


def test_numbers_of_workers() -> None:
    events = KVEventAggregator(1)
    events.increment_workers()
    events.increment_workers(2)
    assert events.get_number_of_workers() == 4
    events.reset_workers()
    assert events.get_number_of_workers() == 1
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            KVEventAggregator(wrong)
        with pytest.raises(ValueError, match="at least 1"):
            events.increment_workers(wrong)


class Reported(KVConnectorKVEvents):
    """As clients write it."""

    def __init__(self, num_workers: int) -> None:
        self._events = KVEventAggregator(num_workers)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self._events.add_events(events)

    def aggregate(self) -> Reported:
        common = self._events.get_common_events()
        self._events.clear_events()
        self._events.add_events(common)
        self._events.reset_workers()
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._events.increment_workers(count)

    def get_all_events(self) -> list[KVCacheEvent]:
        return self._events.get_all_events()

    def get_number_of_workers(self) -> int:
        return self._events.get_number_of_workers()

    def clear_events(self) -> None:
        self._events.clear_events()


def test_what_workers_agree_on_survives_aggregation() -> None:
    mine, other = Reported(1), Reported(1)
    mine.add_events([stored(1), stored(2)])
    other.add_events([stored(2), stored(3)])
    mine.add_events(other.get_all_events())
    mine.increment_workers(other.get_number_of_workers())
    assert mine.aggregate().get_all_events() == [stored(2)]
    assert mine.get_number_of_workers() == 1
