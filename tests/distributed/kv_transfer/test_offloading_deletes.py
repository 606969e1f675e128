# SPDX-License-Identifier: Apache-2.0
"""A file is removed only as long as nothing newer has its name."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.kv_transfer.test_offloading_parts import ATTENTION, cache_of, key
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import (
    FileNames,
    FileStore,
    file_name,
    parse_name,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.host_memory import HostMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    JobReport,
    MovedBlock,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
    StoreJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.stores import StoreScheduling
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.transfers import Transfers
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import KVCacheBlock, Tail

CONTENT = key(1)
NAME = file_name(CONTENT, None)
PLAN = cache_of(ATTENTION).plan
DONE = JobReport(1)
FAILED = JobReport(1, frozenset({0}))


class Stores:
    """The scheduler's side for one rank, and the device blocks that get the same content."""

    def __init__(self) -> None:
        self.host, self.files = Tier(PLAN, 4), Tier(PLAN, 4)
        self.deletes: list[str] = []
        self.scheduling = StoreScheduling(
            self.host, self.files, 1, FileNames(), self.deletes, Counter()
        )

    def store(self, block_id: int) -> tuple[KVCacheBlock, int]:
        """A device block is complete and leaves; its job."""
        block = KVCacheBlock(block_id, 0)
        self.scheduling.cached(block, CONTENT, None)
        assert self.scheduling.take_job() is None, "it is complete in the next step"
        job = self.scheduling.take_job()
        assert job is not None and [moved.name for moved in job.blocks] == [NAME]
        return block, job.job_id

    def report(self, **reports: dict[int, JobReport]) -> None:
        self.scheduling.take_reports(OffloadingWorkerMetadata(**reports))

    @property
    def holds_file(self) -> bool:
        return self.files.block_of(CONTENT) is not None


def two_writes() -> tuple[Stores, int, int]:
    """A block turns out wrong while it is written; then another one has its content."""
    stores = Stores()
    block, first = stores.store(5)
    stores.scheduling.invalidated(block)
    _, second = stores.store(6)
    stores.report(copied={first: DONE, second: DONE})
    return stores, first, second


def test_a_wrong_file_goes_unless_it_is_being_written_again() -> None:
    stores, first, second = two_writes()
    stores.report(written={first: DONE})
    assert not stores.deletes and not stores.holds_file
    stores.report(written={second: DONE})
    assert not stores.deletes and stores.holds_file


def test_the_last_writer_removes_what_it_could_not_replace() -> None:
    stores, first, second = two_writes()
    stores.report(written={first: DONE})
    stores.report(written={second: FAILED})
    assert stores.deletes == [NAME] and not stores.holds_file
    assert not stores.scheduling._writing and stores.files.usage == 0


def test_reports_of_one_step_may_come_in_any_order() -> None:
    stores, first, second = two_writes()
    stores.report(written={second: DONE})
    stores.report(written={first: DONE})
    assert not stores.deletes and stores.holds_file


def test_a_wrong_file_goes() -> None:
    stores = Stores()
    block, job = stores.store(5)
    stores.scheduling.invalidated(block)
    stores.report(copied={job: DONE}, written={job: DONE})
    assert stores.deletes == [NAME] and not stores.holds_file


# ---- the worker's side -------------------------------------------------------------------------


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given before `submit` returns."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_result(fn(*args, **kwargs))
        return result


def test_a_step_removes_before_it_writes(tmp_path: Path) -> None:
    """A file tier may give up a content in the step in which the device has it again. However fast
    the copy is, and however slow the disk, the new file stays."""
    arena = torch.randint(256, (5 * PLAN.page_bytes,), dtype=torch.uint8)
    store = FileStore(str(tmp_path), {}, 0)
    host = HostMemory(PLAN, 4, pinned=False)
    transfers = Transfers(arena, PLAN, host, store, lambda: None)
    transfers._threads.shutdown()
    transfers._threads = AtOnce()
    store.write(NAME, np.zeros(PLAN.groups[0].block_bytes, np.uint8), 0)
    connector = object.__new__(OffloadingConnector)
    connector._transfers = transfers
    stores = StoreJob(1, [MovedBlock(0, 2, 1, NAME)])
    connector.handle_preemptions(OffloadingMetadata(stores=stores, deletes=[NAME]))
    transfers.close()
    found = np.zeros(PLAN.groups[0].block_bytes, np.uint8)
    store.read(NAME, found)
    assert np.array_equal(found, arena[2 * PLAN.page_bytes :][: len(found)].numpy())


# ---- names -------------------------------------------------------------------------------------


def test_renewed_names_are_an_engines_own() -> None:
    """No prefix leads to them, and the next start can read them like any other."""
    tail = Tail(key(7), key(6), 5)
    one, other = FileNames(), FileNames()
    assert one.of(key(1), None) == other.of(key(1), None) == file_name(key(1), None)
    one.renew()
    other.renew()
    for content in ((key(1), None), (tail.key, tail)):
        names = {one.of(*content), other.of(*content), file_name(*content)}
        assert len(names) == 3 and one.of(*content) == one.of(*content)
        found, found_tail = parse_name(one.of(*content))
        assert found not in (key(1), tail.key)
        if content[1] is not None:
            assert found_tail is not None and found_tail.length == tail.length
            assert found_tail.parent != tail.parent
    before = one.of(key(1), None)
    one.renew()
    assert one.of(key(1), None) != before
