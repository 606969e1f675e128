# SPDX-License-Identifier: Apache-2.0
"""A server whose workers are Ray actors on two nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import httpx
import pytest
import torch

from tests.e2e.ray_cluster import RayCluster
from tests.e2e.remote_server import RemoteServer
from tests.e2e.test_process import LONG, gone, in_background
from tests.tiny_models import hf_reference_generate, tiny_model
from tests.v1.executor.fake_worker import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="two nodes would want a GPU each"),
]

PROMPT = [5, 6, 7, 30, 2, 9, 9, 40]
FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "-tp", "2")


#: from a death to the end of every process
END_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as both_nodes:
        yield both_nodes


@contextmanager
def served(cluster: RayCluster) -> Iterator[RemoteServer]:
    flags = (*FLAGS, "--distributed-executor-backend", "ray")
    env = {"RAY_ADDRESS": cluster.address}
    with RemoteServer(tiny_model("qwen3_5"), *flags, env=env) as server:
        assert cluster.free_cpus() == 0
        assert len(cluster.actors()) == 2
        yield server


def assert_ends(server: RemoteServer, cluster: RayCluster, end: Callable[[], None]) -> None:
    """After `end` while a request runs: it fails, and nothing is left within `END_S`."""
    processes = [*cluster.actors(), *cluster.actors("RayWitness"), *server.children()]
    replies: list[httpx.Response | httpx.TransportError] = []
    thread = in_background(server, LONG, replies)
    began = time.monotonic()
    end()
    assert server.wait(60) != 0
    assert gone(processes)
    assert time.monotonic() - began < END_S
    thread.join()
    reply = replies[0]
    assert isinstance(reply, httpx.TransportError) or reply.status_code == 500
    assert "the Ray actor of rank" in server.log()


@pytest.mark.nightly
def test_the_death_of_an_actor_ends_all(cluster: RayCluster) -> None:
    with served(cluster) as server:
        assert_ends(server, cluster, cluster.actors()[1].kill)
    wait_until(lambda: cluster.free_cpus() == 2)


def test_an_actor_that_is_stopped_ends_all(cluster: RayCluster) -> None:
    """Another process of its node sees that it does nothing, which is not said by itself."""
    with served(cluster) as server:
        stopped = cluster.actors()[1]
        assert_ends(server, cluster, stopped.suspend)
        assert "does not go on, for 20 s: " in server.log()
    wait_until(lambda: cluster.free_cpus() == 2)


def test_actors_serve_and_the_death_of_a_node_ends_all(cluster: RayCluster) -> None:
    """The last test of the cluster, which has one node then."""
    with served(cluster) as server:
        shown = {d["what"]: d["chosen"] for d in server.get("/decisions")}
        assert shown["workers"] == "2 Ray actors"
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        reply = server.post("/v1/completions", **body, return_token_ids=True)
        expected = hf_reference_generate(tiny_model("qwen3_5"), PROMPT, 24)
        assert reply["choices"][0]["token_ids"] == expected
        assert_ends(server, cluster, cluster.kill_second_node)
    wait_until(lambda: cluster.free_cpus() == 1)
