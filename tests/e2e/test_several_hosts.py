# SPDX-License-Identifier: Apache-2.0
"""A server whose workers are on two hosts, which here are two trees of processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.e2e.remote_server import MAIN, RemoteServer
from tests.e2e.test_process import LONG, gone, in_background
from tests.forked_python import ForkedPython
from tests.ports import free_port
from tests.tiny_models import hf_reference_generate, tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="two hosts would want the same GPU"),
]

#: from the death of a host to the end of every process
END_S = 30.0
PROMPT = [5, 6, 7, 30, 2, 9, 9, 40]
#: a process that is forked imports nothing again
ENV = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_CPU_KVCACHE_SPACE": "0.05"}


class SecondHost:
    """`vllm serve MODEL FLAGS --headless --node-rank 1`."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-node-", suffix=".log")  # noqa: SIM115
        words = ["serve", str(model), *flags, "--headless", "--node-rank", "1"]
        self.process = ForkedPython(MAIN, words, self._log, env=_environment())

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        one = psutil.Process(self.process.pid)
        return [one, *one.children(recursive=True)]


def _environment() -> dict[str, str]:

    return {**os.environ, **ENV}


def flags_of_both() -> tuple[str, ...]:
    sizes = ("--dtype", "float32", "--max-model-len", "4096", "-tp", "2", "--nnodes", "2")
    return (*sizes, "--master-addr", "127.0.0.1", "--master-port", str(free_port()))


def listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses at which they do."""
    connections = [one for process in processes for one in process.net_connections()]
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


@contextmanager
def second_host(*flags: str) -> Iterator[SecondHost]:
    """The other host comes first: the order does not matter."""
    host = SecondHost(tiny_model("qwen3_5"), *flags)
    try:
        yield host
    finally:
        host.process.kill()
        host.process.wait(60)


def test_two_hosts_serve_and_the_death_of_one_ends_both() -> None:
    flags, model = flags_of_both(), tiny_model("qwen3_5")
    with second_host(*flags) as second, RemoteServer(model, *flags, env=ENV) as server:
        shown = {d["what"]: d["chosen"] for d in server.get("/decisions")}
        assert shown["hosts"] == "2, 1 workers each"
        body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        choice = server.post("/v1/completions", **body, max_tokens=24)["choices"][0]
        # What one worker computes, token for token.
        assert choice["token_ids"] == hf_reference_generate(model, PROMPT, 24)
        constrained = {"structured_outputs": {"choice": ["yes", "no"]}, "prompt": PROMPT}
        text = server.post("/v1/completions", **constrained, max_tokens=8)["choices"][0]["text"]
        assert text in ("yes", "no")

        first = [*server.children(), psutil.Process(server.process.pid)]
        others, replies = second.tree(), []
        assert len(others) > 1, "it has a worker"
        assert listening(first + others) == {"127.0.0.1"}, "collectives, too"
        thread = in_background(server, LONG, replies)
        began = time.monotonic()
        second.process.kill()
        assert server.wait(60) != 0
        assert gone([*first, *others]) and time.monotonic() - began < END_S
        thread.join()
        reply = replies[0]
        assert isinstance(reply, httpx.TransportError) or reply.status_code == 500
        assert "node 1 (127.0.0.1, rank 1) is gone" in server.log()


def test_a_host_that_does_not_come_is_named_without_a_trace() -> None:
    first = RemoteServer(
        tiny_model("qwen3_5"), *flags_of_both(), "--distributed-timeout-seconds", "1", env=ENV
    )
    with pytest.raises(RuntimeError, match="the server ended: 1"), first:
        pass
    *_, last = first.log().splitlines()
    assert last.startswith("vllm serve: error: node 1 has not come to 127.0.0.1:"), last
    assert "Traceback" not in first.log()


def test_flags_that_differ_are_named_on_both_hosts() -> None:
    flags = flags_of_both()
    differ = "--max-num-seqs is 8 on node 1 and 9 on node 0"
    with second_host(*flags, "--max-num-seqs", "8") as second:
        first = RemoteServer(tiny_model("qwen3_5"), *flags, "--max-num-seqs", "9", env=ENV)
        with pytest.raises(RuntimeError, match=differ), first:
            pass
        assert second.process.wait(60) == 1
        assert f"does not start: {differ}" in second.log()
