# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between a device, host memory and files, beside the steps.

Copies run on two side streams, one per direction, ordered against the steps by events. Digests and
files are the work of threads. Nothing here waits for the device on the thread of the steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import runs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.arrival import make_check
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileStore
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.host_memory import HostMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    JobReport,
    LoadJob,
    MovedBlock,
    OffloadingStats,
    StoreJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.seal import (
    SealBroken,
    balanced,
    digests,
    num_threads,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import ArenaPlan

logger = init_logger(__name__)


#: about the most that is copied out before its digests begin
_PART_BYTES = 2**25


class _Parts:
    """Counts a job's parts down; the thread that ends the last one calls `done(failed)`."""

    def __init__(self, count: int, done: Callable[[set[int]], None]) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._failed: set[int] = set()
        self._done = done

    def end(self, failed: set[int]) -> None:
        with self._lock:
            self._left -= 1
            self._failed |= failed
            last = self._left == 0
        if last:
            self._done(self._failed)


class Transfers:
    """One worker's transfers between its `arena` and `host`; `files` may be None. `ended` is called
    when there is a report to take, by the thread that made it."""

    def __init__(
        self,
        arena: Tensor,
        plan: ArenaPlan,
        host: HostMemory,
        files: FileStore | None,
        ended: Callable[[], None],
    ) -> None:
        self._arena, self._plan, self._host, self._files = arena, plan, host, files
        #: digest of what every host block holds, by group
        self._seals = [np.zeros(host.num_blocks(g), np.uint64) for g in range(len(plan.groups))]
        self._check = make_check(arena, plan, host, self._count_seals)
        on_gpu = arena.is_cuda
        self._out = torch.cuda.Stream(arena.device) if on_gpu else None
        self._in = torch.cuda.Stream(arena.device) if on_gpu else None
        self._threads = ThreadPoolExecutor(num_threads(), "kv-offload")
        self._writer = ThreadPoolExecutor(1, "kv-offload-files")
        self._lock = threading.Lock()
        self._ended = ended
        self._copied: dict[int, JobReport] = {}
        self._written: dict[int, JobReport] = {}
        self._loaded: dict[str, set[int]] = {}
        self._stats = OffloadingStats()

    # ---- reports -------------------------------------------------------------------------------

    def take_stored(self) -> tuple[dict[int, JobReport], dict[int, JobReport]]:
        """Store jobs that ended since the last call: in host memory, and in files."""
        with self._lock:
            copied, self._copied = self._copied, {}
            written, self._written = self._written, {}
        return copied, written

    def take_loaded(self) -> dict[str, set[int]]:
        """Request id -> blocks of its job that are not what they should be, of loads that ended."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return loaded

    def take_stats(self) -> OffloadingStats:
        with self._lock:
            stats, self._stats = self._stats, OffloadingStats()
        return stats

    def _count(self, **counts: float) -> None:
        with self._lock:
            self._stats.add(**counts)

    # ---- out of the device ---------------------------------------------------------------------

    def store(self, job: StoreJob) -> None:
        """Copy blocks out as they are once all steps launched so far have run."""
        began = time.perf_counter()
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._arena.device))

        def done(failed: set[int]) -> None:
            num_bytes = sum(self._plan.groups[b.group].block_bytes for b in job.blocks)
            seconds = time.perf_counter() - began
            self._count(store_bytes=num_bytes, store_blocks=len(job.blocks), store_seconds=seconds)
            with self._lock:
                self._copied[job.job_id] = JobReport(1, frozenset(failed))
            self._ended()
            if any(block.name is not None for block in job.blocks):
                self._writer.submit(self._write, job, failed)

        parts = self._split(job.blocks, _PART_BYTES, num_threads())
        counter = _Parts(len(parts), done)
        for part in parts:
            copied = self._copy([job.blocks[i] for i in part], self._out, to_host=True)
            self._threads.submit(self._seal, job.blocks, part, copied, counter)

    def before_overwriting(self) -> None:
        """Order what the device does next after all copies out of it."""
        if self._out is not None:
            torch.cuda.current_stream(self._arena.device).wait_stream(self._out)

    def _seal(
        self,
        blocks: Sequence[MovedBlock],
        part: Sequence[int],
        copied: torch.cuda.Event | None,
        counter: _Parts,
    ) -> None:
        """Thread: make the digests of blocks that have arrived in host memory."""
        failed: set[int] = set()
        try:
            if copied is not None:
                copied.synchronize()
            spans = [self._host.extent(blocks[i].group, blocks[i].host_block) for i in part]
            began = time.perf_counter()
            found = digests(self._host.buffer, spans)
            self._count_seals(sum(size for _, size in spans), time.perf_counter() - began)
            for i, sealed in zip(part, found, strict=True):
                self._seals[blocks[i].group][blocks[i].host_block] = sealed
        except Exception:
            logger.exception("blocks could not be copied to host memory")
            failed.update(part)
        counter.end(failed)

    def _write(self, job: StoreJob, failed: set[int]) -> None:
        """Writer: put blocks into files."""
        assert self._files is not None
        for i, block in enumerate(job.blocks):
            if block.name is None or i in failed:
                continue
            data = self._host.block(block.group, block.host_block)
            try:
                sealed = int(self._seals[block.group][block.host_block])
                self._files.write(block.name, data, sealed)
                self._count(file_write_bytes=data.nbytes)
            except Exception as error:  # the report must come, or the host blocks stay held
                logger.error("cannot write %s: %s", self._files.path(block.name), error)
                self._count(file_write_failures=1)
                failed = failed | {i}
        with self._lock:
            self._written[job.job_id] = JobReport(1, frozenset(failed))
        self._ended()

    def delete(self, names: Sequence[str]) -> None:
        """Remove files, after what is being written."""
        self._writer.submit(self._delete, names)

    def _delete(self, names: Sequence[str]) -> None:
        assert self._files is not None
        for name in names:
            try:
                self._files.delete(name)
            except OSError as error:
                logger.error("cannot remove %s: %s", self._files.path(name), error)

    # ---- to the device -------------------------------------------------------------------------

    def load(self, job: LoadJob) -> None:
        """Fill device blocks that nothing launched from here on touches before the report."""
        began = time.perf_counter()
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(self._arena.device))

        def done(failed: set[int]) -> None:
            num_bytes = sum(self._plan.groups[b.group].block_bytes for b in job.blocks)
            seconds = time.perf_counter() - began
            self._count(load_bytes=num_bytes, load_blocks=len(job.blocks), load_seconds=seconds)
            with self._lock:
                self._loaded[job.req_id] = failed
            self._ended()

        tasks = self._load_tasks(job)
        counter = _Parts(len(tasks), done)
        for task in tasks:
            self._threads.submit(self._fill, job, task, counter)

    def _load_tasks(self, job: LoadJob) -> list[list[list[int]]]:
        """The parts of a job for each thread; files are read by all threads."""
        check = self._check
        if all(block.name is None for block in job.blocks):
            return check.tasks(self._split(job.blocks, check.part_bytes, check.num_parts))
        parts = self._split(job.blocks, check.part_bytes, num_threads())
        return [task for part in parts for task in check.tasks([part])]

    def _fill(self, job: LoadJob, parts: list[list[int]], counter: _Parts) -> None:
        """Thread: read what comes from files, copy the parts and check their digests."""
        failed: set[int] = set()
        try:
            for i in chain.from_iterable(parts):
                if job.blocks[i].name is not None and not self._read(job, i):
                    failed.add(i)
            good = [[i for i in part if i not in failed] for part in parts]
            blocks = [[job.blocks[i] for i in part] for part in good]
            found = self._check.digests(
                blocks, lambda part: self._copy(blocks[part], self._in, to_host=False)
            )
            for i, one in zip(chain.from_iterable(good), found, strict=True):
                if self._is_broken(job, job.blocks[i], one):
                    failed.add(i)
        except Exception:
            logger.exception("request %s: loading failed", job.req_id)
            failed.update(*parts)
            self._await_copies_in(job.req_id)
        if failed:
            self._count(broken_blocks=len(failed))
        counter.end(failed)

    def _await_copies_in(self, req_id: str) -> None:
        """What was launched has been written: blocks whose load ends get other owners."""
        if self._in is None:
            return
        try:
            self._in.synchronize()
        except Exception:  # the device is lost, and writes nothing any more
            logger.exception("request %s: copies to the device failed", req_id)

    def _read(self, job: LoadJob, i: int) -> bool:
        """Fill a block's slot of host memory from its file."""
        assert self._files is not None
        block = job.blocks[i]
        assert block.name is not None
        target = self._host.block(block.group, block.host_block)
        try:
            sealed = self._files.read(block.name, target)
        except (OSError, SealBroken) as error:
            logger.error("request %s, state group %d: %s", job.req_id, block.group, error)
            return False
        self._seals[block.group][block.host_block] = sealed
        self._count(file_read_bytes=target.nbytes, promoted_blocks=1)
        return True

    def _is_broken(self, job: LoadJob, block: MovedBlock, found: int) -> bool:
        """Whether a block's bytes are not what was sealed."""
        sealed = int(self._seals[block.group][block.host_block])
        if found == sealed:
            return False
        logger.error(
            "request %s, state group %d, block %d: sealed with digest %016x, arrived with %016x",
            job.req_id,
            block.group,
            block.device_block,
            sealed,
            found,
        )
        return True

    # ---- both ways -----------------------------------------------------------------------------

    def _copy(
        self,
        blocks: Sequence[MovedBlock],
        stream: torch.cuda.Stream | None,
        to_host: bool,
    ) -> torch.cuda.Event | None:
        """Launch the copies; the event after them, None where they have been made."""
        with torch.cuda.stream(stream):
            for group, device, host, count in runs(block[:3] for block in blocks):
                stride = self._plan.block_stride(group)
                there = self._arena[device * stride : (device + count) * stride]
                here = self._host.span(group, host, count)
                target, source = (here, there) if to_host else (there, here)
                target.copy_(source, non_blocking=True)
            if stream is None:
                return None
            event = torch.cuda.Event()
            event.record(stream)
            return event

    def _count_seals(self, num_bytes: int, seconds: float) -> None:
        self._count(seal_bytes=num_bytes, seal_seconds=seconds)

    def _split(
        self, blocks: Sequence[MovedBlock], part_bytes: int, num_parts: int
    ) -> list[list[int]]:
        """Indices of a job's blocks, the largest blocks first, in at least `num_parts` parts of up
        to `part_bytes`, or one block. Parts of a large job are many, so that the digests of one are
        made while the next is copied."""
        sizes = [group.block_bytes for group in self._plan.groups]
        order = sorted(range(len(blocks)), key=blocks.__getitem__)
        order.sort(key=lambda i: -sizes[blocks[i].group])
        ordered = [sizes[blocks[i].group] for i in order]
        count = max(num_parts, -(-sum(ordered) // part_bytes))
        return [[order[i] for i in part] for part in balanced(ordered, count)]

    def close(self) -> None:
        """Finish what was begun."""
        self._threads.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        if self._out is not None and self._in is not None:
            self._out.synchronize()
            self._in.synchronize()
