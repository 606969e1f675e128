# SPDX-License-Identifier: Apache-2.0
"""NIXL between two GPUs: bytes take NVLink, whichever thread meets the peer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Range
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Deadline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="the nixl library is not installed"
    ),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]

SIZE = 256 * 2**20
#: bytes per second that memory of the host cannot pass on: a few GB/s were seen
BEYOND_HOST = 50e9
PEER = textwrap.dedent(f"""
    import signal, torch
    from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
    torch.cuda.set_device(1)
    transport = NixlTransport("peer")
    memory = torch.arange({SIZE} // 8, device="cuda:1").view(torch.uint8)
    torch.cuda.synchronize()
    transport.register(memory, None)
    print("described", transport.describe().hex(), flush=True)
    signal.pause()
""")


def test_bytes_take_nvlink() -> None:
    """Connectors meet their peers in threads of their own, which have used no GPU before."""
    torch.cuda.set_device(0)
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    seconds = []

    def read_all(description: bytes) -> None:
        name = transport.connect(("127.0.0.1", 0), description)
        for _ in range(4):
            began = time.perf_counter()
            transport.read(name, [Range(0, 0, SIZE)], Deadline(30))
            seconds.append(time.perf_counter() - began)
        transport.disconnect(name)

    with subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True) as peer:
        transport = NixlTransport("reader")
        try:
            transport.register(None, target)
            assert peer.stdout is not None
            line = next(line for line in peer.stdout if line.startswith("described"))
            reading = threading.Thread(target=read_all, args=(bytes.fromhex(line.split()[1]),))
            reading.start()
            reading.join()
        finally:
            transport.close()
            peer.kill()
    assert torch.equal(target.view(torch.int64).cpu(), torch.arange(SIZE // 8))
    assert SIZE / min(seconds) > BEYOND_HOST
