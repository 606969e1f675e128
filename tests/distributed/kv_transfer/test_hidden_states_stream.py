# SPDX-License-Identifier: Apache-2.0
"""Hidden states to trainers that connect: complete rows or an error, whoever dies or is slow."""

from __future__ import annotations

import importlib.util
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
)
from tests.distributed.kv_transfer.test_hidden_states_ring import expect, make_rows
from tests.forked_python import talking_python
from vllm import hidden_states_stream
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_stream import RowStream
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.tcp_transport import TcpTransport
from vllm.hidden_states_record import Policy
from vllm.hidden_states_storage import RowFormat
from vllm.hidden_states_stream import RemoteRows, StreamBroken, StreamRefused

pytestmark = pytest.mark.slow
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the nixl library is not installed"
)
TRANSPORTS = ["tcp", pytest.param("nixl", marks=needs_nixl)]

FORMAT = RowFormat(COLUMNS, HIDDEN, torch.float32)
ABOUT = {"layer_ids": [0, 1, 2], "hidden_size": HIDDEN, "dtype": "float32", "storage": "auto"}
#: memory for ten records of six rows
NUM_BYTES = 10 * 512


@contextmanager
def serve(
    transport: str = "tcp", lease_s: float = 30.0, num_bytes: int = NUM_BYTES, **about: Any
) -> Iterator[RowStream]:
    carrier = TcpTransport() if transport == "tcp" else NixlTransport(f"engine-{time.monotonic()}")
    told = {"transport": transport, "rows": {**ABOUT, **about}}
    made = RowStream(("127.0.0.1", 0), num_bytes, FORMAT, lease_s, carrier, told)
    try:
        yield made
    finally:
        made._lease_s = 0.0  # readers that a failed test has left are not waited for
        made.close()


def where(stream: RowStream) -> str:
    return f"127.0.0.1:{stream.port}"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_records_of_all_sizes_come_in_order(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less memory than they need, and larger than what one read brings."""
    monkeypatch.setattr(hidden_states_stream, "_BUFFER_BYTES", 1000)
    sizes = [1, 69, 30, 2, 66, 64, 5, 50, 40, 33] * 4
    with serve(transport) as stream, RemoteRows(where(stream)) as reader:
        assert reader.about == ABOUT

        def write() -> None:
            for i, size in enumerate(sizes):
                assert stream.put(make_rows(i, size), "wait")

        thread = threading.Thread(target=write)
        thread.start()
        for i, size in enumerate(sizes):
            expect(reader.get(60), i, size)
        thread.join()
        with pytest.raises(TimeoutError, match="no rows within"):
            reader.get(0.01)
        assert reader.num_dropped == 0 and stream._staging.used_bytes == 0


def test_readers_share() -> None:
    with serve() as stream, RemoteRows(where(stream)) as one, RemoteRows(where(stream)) as other:
        for i in range(4):
            stream.put(make_rows(i, 3), "wait")
        for i, reader in enumerate((one, other, other, one)):
            expect(reader.get(60), i, 3)


@pytest.mark.parametrize("policy", ["drop_new", "drop_oldest", "wait"])
def test_full_memory(policy: Policy) -> None:
    """A writer that waits is told to stop."""
    with serve() as stream:
        put = [stream.put(make_rows(i, 6), policy, lambda: True) for i in range(25)]
        assert put.count(True) == (25 if policy == "drop_oldest" else 10)
        first = 15 if policy == "drop_oldest" else 0
        with RemoteRows(where(stream)) as reader:
            for i in range(10):
                expect(reader.get(60), first + i, 6)
            with pytest.raises(TimeoutError):
                reader.get(0)
            assert reader.num_dropped == stream.num_dropped == 15


def test_what_does_not_belong_in_the_stream() -> None:
    with serve() as stream:
        with pytest.raises(ValueError, match="not rows of this stream: .*float16 rows"):
            rows = make_rows(0, 5)
            stream.put(type(rows)("a", rows.token_ids, rows.hidden_states.half()), "wait")
        with pytest.raises(ValueError, match="in a stream of 5120"):
            stream.put(make_rows(0, 100), "wait")


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[TcpTransport] = []
    monkeypatch.setattr(TcpTransport, "close", lambda self: closed.append(self))
    with serve() as stream:
        other = TcpTransport()
        address = ("127.0.0.1", stream.port)
        where = f"host '127.0.0.1' and port {stream.port} of kv_connector_extra_config"
        with pytest.raises(OSError, match=f"{where}: Address already in use.*; give an address"):
            RowStream(address, NUM_BYTES, FORMAT, 1.0, other, {})
        assert closed == [other]


def lease(reader: RemoteRows) -> dict[str, Any]:
    """What a reader does first of what `get` does, and then nothing."""
    record = reader._exchange({"op": "next", "wait_s": 5.0}, 60)["record"]
    assert isinstance(record, dict)
    return record


def test_a_reader_that_goes_away_with_a_record() -> None:
    with serve(lease_s=600) as stream, RemoteRows(where(stream)) as other:
        with RemoteRows(where(stream)) as reader:
            for i in range(2):
                stream.put(make_rows(i, 6), "wait")
            assert lease(reader)["number"] == 0
        # The end of the connection may be seen after the other reader has asked.
        found = {rows.request_id for rows in (other.get(60), other.get(60)) if rows is not None}
        assert found == {"request-0", "request-1"}


def test_a_lease_that_runs_out() -> None:
    """The reader that was too slow has nothing of it, and gets the next record instead."""
    with serve() as stream, RemoteRows(where(stream)) as slow, RemoteRows(where(stream)) as other:
        stream.put(make_rows(0, 6), "wait")
        record = lease(slow)
        with pytest.raises(TimeoutError):
            other.get(0)
        stream._records[0].until = 0.0
        again = lease(other)
        assert again["number"] == 0 and slow._take(record) is None, "it is the other one's now"
        expect(other._take(again), 0, 6)
        stream.put(make_rows(1, 7), "wait")  # where the first one was
        assert stream._records[1].offset == record["offset"]
        assert slow._take(record) is None
        expect(slow.get(60), 1, 7)


def test_what_a_reader_fetches_is_not_overwritten() -> None:
    with serve() as stream, RemoteRows(where(stream)) as reader:
        for i in range(10):
            stream.put(make_rows(i, 6), "drop_oldest")
        record = lease(reader)
        for i in range(10, 25):
            assert stream.put(make_rows(i, 6), "drop_oldest")
        expect(reader._take(record), 0, 6)
        expect(reader.get(60), 16, 6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_damage_is_not_handed_out(transport: str) -> None:
    with serve(transport) as stream, RemoteRows(where(stream)) as reader:
        for i in range(2):
            stream.put(make_rows(i, 6), "wait")
        stream._memory[100] ^= 1
        with pytest.raises(StreamBroken, match="was sealed with"):
            reader.get(60)
        expect(reader.get(60), 1, 6)


def test_a_record_that_cannot_be_one() -> None:
    with serve() as stream, RemoteRows(where(stream)) as reader:
        stream.put(make_rows(0, 6), "wait")
        stream._records[0].num_rows = 7
        with pytest.raises(StreamBroken, match="a record of .* has 7 rows"):
            reader.get(60)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_end(transport: str) -> None:
    """Every reader gets what is left, or waits for what another one may not fetch, and is told."""
    with serve(transport) as stream:
        with RemoteRows(where(stream)) as reader, RemoteRows(where(stream)) as other:
            for i in range(3):
                stream.put(make_rows(i, 6), "wait")
            record = lease(other)
            closing = threading.Thread(target=stream.close)
            closing.start()
            expect(reader.get(60), 1, 6)
            expect(reader.get(60), 2, 6)
            with pytest.raises(TimeoutError):
                reader.get(0.05)
            expect(other._take(record), 0, 6)
            assert list(reader) == list(other) == []
            closing.join(60)
            assert not closing.is_alive()
            assert reader.get() is None
        with pytest.raises(TimeoutError, match="no engine answers at 127.0.0.1"):
            RemoteRows(where(stream), timeout_s=0.01)


def test_the_end_does_not_wait_for_readers_that_do_nothing() -> None:
    with serve(lease_s=0.05) as stream, RemoteRows(where(stream)) as reader:
        stream.put(make_rows(0, 6), "wait")
        stream.close()
        for _ in range(2):
            with pytest.raises(StreamBroken, match="cannot be reached any more"):
                reader.get(60)


ENGINE = textwrap.dedent("""
    import signal
    from tests.distributed.kv_transfer import test_hidden_states_stream as tests
    with tests.serve("TRANSPORT") as stream:
        for i in range(2):
            stream.put(tests.make_rows(i, 6), "wait")
        print("port", stream.port, flush=True)
        signal.pause()
""")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_is_killed(transport: str, tmp_path: Path) -> None:
    """In a process of its own, which is where its memory is."""
    code = ENGINE.replace("TRANSPORT", transport)
    with talking_python(tmp_path / "engine.py", code) as (process, output):
        line = next(line for line in output if line.startswith("port"))
        with RemoteRows(f"127.0.0.1:{line.split()[1]}") as reader:
            expect(reader.get(60), 0, 6)
            process.kill()
            process.wait()
            with pytest.raises(StreamBroken, match="the engine has died"):
                reader.get(60)


@pytest.mark.parametrize(
    ("told", "wanted", "message"),
    [
        ({}, {"layer_ids": (0, 1, 3)}, r"layer_ids is \[0, 1, 2\] there, wanted is \(0, 1, 3\)"),
        ({}, {"hidden_size": 8}, "hidden_size is 4 there, wanted is 8"),
        ({}, {"dtype": "bfloat16"}, "dtype is 'float32' there"),
        ({}, {"storage": "fp8_e4m3"}, "storage is 'auto' there"),
        ({}, {"columns": 3}, "columns is nothing that rows have: layer_ids, hidden_size"),
        ({"storage": "int3"}, {}, "storage is 'int3' there, wanted is one of auto, fp8_e4m3"),
        ({"dtype": "float3"}, {}, "dtype is 'float3' there"),
    ],
)
def test_other_rows_than_expected(
    told: dict[str, Any], wanted: dict[str, Any], message: str
) -> None:
    with serve(**told) as stream:
        with pytest.raises(StreamRefused, match=message):
            RemoteRows(where(stream), expect=wanted)
        with suppress(StreamRefused):
            RemoteRows(where(stream), expect=ABOUT).close()


def test_other_versions_and_transports() -> None:
    with serve() as stream:
        for field, message in (("version", "version is 99 there"), ("transport", "is 99 there")):
            stream._hello[field] = 99
            with pytest.raises(StreamRefused, match=message):
                RemoteRows(where(stream))
            stream._hello["version"] = 1
        for address in ("127.0.0.1", ":5600", "host:port"):
            with pytest.raises(ValueError, match="give HOST:PORT"):
                RemoteRows(address)


def test_a_forked_child_opens_its_own() -> None:
    with serve() as stream, RemoteRows(where(stream)) as reader:
        reader._process._pid += 1
        with pytest.raises(RuntimeError, match="open one in each"):
            reader.get(0)
        reader._process._pid -= 1
