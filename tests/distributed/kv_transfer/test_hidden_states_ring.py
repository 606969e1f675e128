# SPDX-License-Identifier: Apache-2.0
"""Hidden states in a ring of shared memory: complete rows or nothing, however slow the reader."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
    Harness,
    cache_config,
    extraction_config,
    row_values,
    transfer_config,
)
from tests.distributed.kv_transfer.trainer_checks import (
    check_kit,
    check_same_as_files,
    check_slow_trainer,
    check_too_many_rows,
    run,
)
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_ring import Policy, RingBroken, RingReader, RingWriter, Rows
from vllm.hidden_states_ring_file import record_bytes
from vllm.hidden_states_storage import RowFormat

FORMAT = RowFormat(COLUMNS, HIDDEN, torch.float32)
ROW_BYTES = FORMAT.row_bytes


def make_rows(index: int, num_tokens: int) -> Rows:
    tokens = torch.arange(num_tokens) + 1000 * index
    return Rows(f"request-{index}", tokens, row_values(index, num_tokens))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rows")


@pytest.fixture
def writer(path: str) -> Iterator[RingWriter]:
    made = RingWriter(path, 4096, FORMAT)
    yield made
    made.close()


def expect(rows: Rows | None, index: int, num_tokens: int) -> None:
    assert rows is not None
    wanted = make_rows(index, num_tokens)
    assert rows.request_id == wanted.request_id
    assert torch.equal(rows.token_ids, wanted.token_ids)
    assert torch.equal(rows.hidden_states, wanted.hidden_states)


def test_records_of_all_sizes_come_in_order(path: str, writer: RingWriter) -> None:
    """Many times around the ring, with a reader that is as fast as it likes."""
    sizes = [random.Random(3).randrange(1, 70) for _ in range(300)]
    assert record_bytes(69, ROW_BYTES, "request-0") <= 4096

    def write() -> None:
        for i, size in enumerate(sizes):
            assert writer.put(make_rows(i, size), "wait")

    thread = threading.Thread(target=write)
    thread.start()
    with RingReader(path) as reader:
        for i, size in enumerate(sizes):
            expect(reader.get(10), i, size)
        thread.join()
        with pytest.raises(TimeoutError):
            reader.get(0.01)
        assert reader.num_dropped == 0


def test_readers_share(path: str, writer: RingWriter) -> None:
    with RingReader(path) as one, RingReader(path) as other:
        for i in range(4):
            writer.put(make_rows(i, 3), "wait")
        for i, reader in enumerate((one, other, other, one)):
            expect(reader.get(1), i, 3)


@pytest.mark.parametrize("policy", ["drop_new", "drop_oldest", "wait"])
def test_a_full_ring(policy: Policy, path: str, writer: RingWriter) -> None:
    """Ten records of 384 bytes fit; a writer that waits is told to stop."""
    put = [writer.put(make_rows(i, 6), policy, lambda: True) for i in range(25)]
    assert put.count(True) == (25 if policy == "drop_oldest" else 10)
    with RingReader(path) as reader:
        num_kept = 25 - reader.num_dropped
        assert num_kept in (9, 10), "the end of the ring may be too short for a record"
        for i in range(num_kept):
            expect(reader.get(1), i + reader.num_dropped if policy == "drop_oldest" else i, 6)
        with pytest.raises(TimeoutError):
            reader.get(0)


def test_what_does_not_belong_in_the_ring(writer: RingWriter) -> None:
    rows = make_rows(0, 5)
    for wrong, message in (
        (Rows("a", rows.token_ids[:4], rows.hidden_states), "for 4 tokens"),
        (Rows("a", rows.token_ids, rows.hidden_states.half()), "float16 rows"),
        (make_rows(0, 200), "in a ring of 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.put(wrong, "wait")


def test_one_writer_and_the_end(path: str) -> None:
    writer = RingWriter(path, 4096, FORMAT)
    with pytest.raises(ValueError, match="another engine writes .*or another replica of this"):
        RingWriter(path, 4096, FORMAT)
    with RingReader(path) as reader:
        writer.put(make_rows(0, 2), "wait")
        writer.close()
        assert [rows.request_id for rows in reader] == ["request-0"]
    again = RingWriter(path, 4096, FORMAT)
    again.close()
    assert not os.path.exists(path), "an empty ring goes with its engine"
    with pytest.raises(TimeoutError, match="no engine has made"):
        RingReader(path, timeout_s=0.01)
    removed = RingWriter(path, 4096, FORMAT)
    os.unlink(path)
    removed.close()
    RingWriter(path, 4096, FORMAT).close()


def flip(path: str, at: int) -> None:
    """Change a bit of a ring's file."""
    with open(path, "r+b", buffering=0) as file:
        [byte] = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


def test_damage_is_not_handed_out(path: str, writer: RingWriter) -> None:
    with RingReader(path) as reader:
        writer.put(make_rows(0, 5), "wait")
        flip(path, 4096 + 100)
        with pytest.raises(RingBroken, match="was sealed with"):
            reader.get(1)
        writer.put(make_rows(1, 5), "wait")
        expect(reader.get(1), 1, 5)


@pytest.mark.parametrize("at", [0, 7, 15])
def test_a_damaged_record_has_no_size(path: str, writer: RingWriter, at: int) -> None:
    """One that cannot lie there is not looked at, nor is there a next one behind it."""
    writer.put(make_rows(0, 5), "wait")
    flip(path, 4096 + at)
    with RingReader(path) as reader, pytest.raises(RingBroken, match="a record of .* rows"):
        reader.get(1)
    with pytest.raises(RingBroken, match="a record of .* rows"):
        for i in range(20):
            writer.put(make_rows(i, 5), "drop_oldest")


@pytest.mark.parametrize("size", [0, 1024, 4096, 4096 + 100])
def test_a_file_that_is_cut_short(path: str, writer: RingWriter, size: int) -> None:
    """By whoever may write to it: no process dies of it, and nothing else is handed out."""
    with RingReader(path) as reader:
        writer.put(make_rows(0, 5), "wait")
        os.truncate(path, size)
        with pytest.raises(RingBroken, match="has been cut short"):
            reader.get(1)
        if size < 4096:
            with pytest.raises(RingBroken, match="has been cut short"):
                writer.put(make_rows(1, 5), "wait")
            with pytest.raises(RingBroken, match="has been cut short"):
                _ = reader.num_dropped
            os.truncate(path, 4096)  # for the fixture
    if size == 0:
        with pytest.raises(RingBroken, match="not a ring"):
            RingReader(path)


def test_a_ring_whose_name_another_one_needs(path: str) -> None:
    """`rows.new` is where `rows` is made; what was there is taken away and not overwritten."""
    first = RingWriter(f"{path}.new", 4096, FORMAT)
    with RingReader(f"{path}.new") as reader:
        first.put(make_rows(0, 5), "wait")
        RingWriter(path, 4096, FORMAT).close()
        expect(reader.get(1), 0, 5)
        with pytest.raises(RingBroken, match="has died"):
            reader.get(20)
    os.close(first._owner)


def test_no_room_for_a_ring(path: str, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full file system. Nothing is left, and the next one is made."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    gc.collect()  # descriptors of other tests are closed now or never
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError, match="File too large: no ring of 8192 bytes") as error:
            RingWriter(path, 8192, FORMAT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == path
    assert [p.name for p in tmp_path.iterdir()] == ["rows.writer"]
    assert len(os.listdir("/proc/self/fd")) == before
    RingWriter(path, 8192, FORMAT).close()


def test_an_engine_that_is_killed(path: str) -> None:
    """What it had finished can be read; then the reader is told."""
    if (child := os.fork()) == 0:
        try:
            ring = RingWriter(path, 4096, FORMAT)
            ring.put(make_rows(0, 5), "wait")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    with RingReader(path) as reader:
        os.waitpid(child, 0)
        expect(reader.get(10), 0, 5)
        with pytest.raises(RingBroken, match="has died"):
            reader.get(20)


def run_with_child(path: str, told: int) -> None:
    """An engine that forks a child after it has made its ring, and says the child's process id."""
    try:
        ring = RingWriter(path, 4096, FORMAT)
        ring.put(make_rows(0, 5), "wait")
        if os.fork() == 0:
            os.write(told, str(os.getpid()).encode())
        signal.pause()
    finally:
        os._exit(1)


def test_a_forked_child_does_not_stand_in_for_its_engine(path: str) -> None:
    """It may be a trainer's data loader, and outlives the engine. Readers are told of its death all
    the same, and another engine can take its place."""
    answer, told = os.pipe()
    if (engine := os.fork()) == 0:
        run_with_child(path, told)
    os.close(told)
    child = int(os.read(answer, 20))
    os.close(answer)
    try:
        with RingReader(path) as reader:
            os.kill(engine, signal.SIGKILL)
            os.waitpid(engine, 0)
            expect(reader.get(10), 0, 5)
            with pytest.raises(RingBroken, match="has died"):
                reader.get(10)
        RingWriter(path, 4096, FORMAT).close()
    finally:
        os.kill(child, signal.SIGKILL)


def read_in_child(reader: RingReader, answer: int) -> None:
    """Take a record, and hold the lock when it is there."""
    try:
        rows = reader.get(10)
        assert rows is not None
        with reader._ring.lock():
            os.write(answer, rows.request_id.encode())
            signal.pause()
    finally:
        os._exit(1)


def test_a_forked_child_reads_for_itself(path: str, writer: RingWriter) -> None:
    """As a data loader's worker does with a reader that was open before. Its lock keeps its parent
    out, and ends with it."""
    for i in range(2):
        writer.put(make_rows(i, 2), "wait")
    told, answer = os.pipe()
    with RingReader(path) as reader:
        if (child := os.fork()) == 0:
            read_in_child(reader, answer)
        os.close(answer)
        first = os.read(told, 20).decode()
        os.close(told)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(reader._ring._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert first == "request-0"
        expect(reader.get(10), 1, 2)


# ---- the connector ------------------------------------------------------------------------------


def harness_of(path: str, **options: Any) -> Harness:
    transfer = transfer_config("RingHiddenStatesConnector", ring_path=path, **options)
    return Harness(extraction_config(transfer), cache_config())


def test_rows_of_requests_arrive(path: str) -> None:
    harness = harness_of(path, ring_bytes=2**16)
    with RingReader(path) as reader:
        sent = run(harness, "prompt", 40)
        sent |= run(harness, "all", 21, include_output_tokens=True)
        assert sent | harness.step() == {"prompt", "all"}
        for index, count in ((0, 40), (1, 22)):
            rows = reader.get(5)
            assert rows is not None and len(rows.token_ids) == count
            assert torch.equal(rows.hidden_states, row_values(index, count))
            expected = [*range(100, 140)] if index == 0 else [*range(100, 121), 7]
            assert rows.token_ids.tolist() == expected
        harness.worker.shutdown()
        assert reader.get(5) is None


def test_a_slow_trainer_makes_requests_keep_their_blocks(path: str) -> None:
    check_slow_trainer(harness_of(path, ring_bytes=4096), lambda: RingReader(path))


def test_a_ring_that_cannot_be_made_is_named() -> None:
    with pytest.raises(VLLMValidationError, match=r"ring_path '/proc/none/x' of .* \(No such file"):
        harness_of("/proc/none/x")


def test_rows_that_can_never_fit_fail_their_request(path: str) -> None:
    check_too_many_rows(harness_of(path, ring_bytes=4096), "in a ring of 4096")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "ring_path None: name a file"),
        ({"ring_path": "/dev/shm/x", "ring_bytes": 0}, "ring_bytes 0"),
        ({"ring_path": "/dev/shm/x", "when_full": "block"}, "when_full 'block': choose one of"),
        ({"ring_path": "/dev/shm/x", "size": 1}, "size 1: .* knows ring_path"),
    ],
)
def test_settings_are_checked(extra: dict[str, Any], message: str) -> None:
    transfer = transfer_config("RingHiddenStatesConnector", **extra)
    with pytest.raises(VLLMValidationError, match=message):
        Harness(extraction_config(transfer), cache_config())


def test_an_engine_gives_a_trainer_what_it_gives_files(tmp_path: Path, path: str) -> None:
    extra = {"ring_path": path, "ring_bytes": 2**20}
    name = "RingHiddenStatesConnector"
    check_same_as_files(name, extra, lambda reply: RingReader(path), 10, tmp_path)


def test_passes_the_kit(tmp_path: Path) -> None:
    extra = {"ring_path": "{storage}/ring", "ring_bytes": 100_000, "when_full": "drop_oldest"}
    check_kit("RingHiddenStatesConnector", extra, tmp_path)
