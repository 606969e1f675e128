# SPDX-License-Identifier: Apache-2.0
"""NIXL between two processes: bytes arrive, and a peer that dies or hangs is noticed in time."""

from __future__ import annotations

import importlib.util
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.forked_python import talking_python
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Range
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Deadline, PeerLost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="the nixl library is not installed"
    ),
]

SIZE = 64 * 2**20
PEER = textwrap.dedent(f"""
    import signal, torch
    from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
    transport = NixlTransport("peer")
    memory = torch.arange({SIZE} // 8).view(torch.uint8)
    transport.register(memory, None)
    print("described", transport.describe().hex(), flush=True)
    signal.pause()
""")


@pytest.fixture(scope="module", autouse=True)
def over_tcp() -> Iterator[None]:
    """Between processes of one machine UCX would read the memory of a stopped one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@contextmanager
def peer(folder: Path) -> Iterator[tuple[int, bytes]]:
    """The process id of a peer, and its description."""
    with talking_python(folder / "peer.py", PEER) as (process, output):
        line = next(line for line in output if line.startswith("described"))
        yield process.pid, bytes.fromhex(line.split()[1])


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_bytes_arrive_until_the_peer_goes_away(fate: signal.Signals, tmp_path: Path) -> None:
    target = torch.zeros(SIZE, dtype=torch.uint8)
    with peer(tmp_path) as (pid, description):
        transport = NixlTransport("reader")
        transport.register(None, target)
        try:
            name = transport.connect(("127.0.0.1", 0), description)
            transport.read(name, [Range(800, 16, 80), Range(0, 400, 8)], Deadline(20))
            assert target[16:96].view(torch.int64).tolist() == list(range(100, 110))
            assert not target[400:408].any() and not target[96:400].any()
            os.kill(pid, fate)
            began = time.monotonic()
            with pytest.raises(PeerLost):
                while True:  # what was under way may still arrive
                    transport.read(name, [Range(0, 0, SIZE)], Deadline(1))
            assert time.monotonic() - began < 10
            transport.disconnect(name)
        finally:
            transport.close()
