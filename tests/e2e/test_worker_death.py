# SPDX-License-Identifier: Apache-2.0
"""A server of two workers: it serves, and the death of one worker ends everything at once."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest
import torch

from tests.e2e.remote_server import RemoteServer
from tests.e2e.test_process import LONG, gone, in_background
from tests.tiny_models import tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU only so far"),
]

FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "-tp", "2")
#: from the death of a worker to the end of every process
END_S = 10.0


def workers_of(server: RemoteServer) -> list[psutil.Process]:
    """The children of the engine core, the youngest of which is the last rank."""
    found = [
        process
        for child in psutil.Process(server.process.pid).children()
        for process in child.children()
        if "resource_tracker" not in " ".join(process.cmdline())
    ]
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def test_a_worker_that_dies_ends_the_server() -> None:
    with RemoteServer(tiny_model("qwen3_5"), *FLAGS) as server:
        shown = {d["what"]: d["chosen"] for d in server.get("/decisions")}
        assert shown["workers"] == "2 processes"
        assert "attention backend" in shown, "what a worker decides is listed, too"
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        assert server.post("/v1/completions", **body)["usage"]["completion_tokens"] == 8
        processes, replies = [*server.children(), psutil.Process(server.process.pid)], []
        workers = workers_of(server)
        assert len(workers) == 2
        thread = in_background(server, LONG, replies)
        died = time.monotonic()
        workers[1].kill()
        assert server.wait(60) != 0
        assert gone(processes) and time.monotonic() - died < END_S
        thread.join()
        reply = replies[0]
        assert isinstance(reply, httpx.TransportError) or reply.status_code == 500
        assert "the worker of rank 1 died (SIGKILL)" in server.log()
