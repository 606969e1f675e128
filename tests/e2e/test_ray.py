# SPDX-License-Identifier: Apache-2.0
"""A server whose workers are Ray actors on two nodes."""

from __future__ import annotations

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
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="two nodes would want a GPU each"),
]

PROMPT = [5, 6, 7, 30, 2, 9, 9, 40]
FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "-tp", "2")


def test_actors_serve_and_the_death_of_one_ends_all() -> None:
    model = tiny_model("qwen3_5")
    flags = (*FLAGS, "--distributed-executor-backend", "ray")
    with RayCluster() as cluster:
        env = {"RAY_ADDRESS": cluster.address}
        with RemoteServer(model, *flags, env=env) as server:
            shown = {d["what"]: d["chosen"] for d in server.get("/decisions")}
            assert shown["workers"] == "2 Ray actors"
            assert cluster.free_cpus() == 0
            body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            reply = server.post("/v1/completions", **body, return_token_ids=True)
            assert reply["choices"][0]["token_ids"] == hf_reference_generate(model, PROMPT, 24)

            actors, replies = cluster.actors(), []
            assert len(actors) == 2
            thread = in_background(server, LONG, replies)
            actors[1].kill()
            assert server.wait(60) != 0
            assert gone(actors)
            thread.join()
            reply = replies[0]
            assert isinstance(reply, httpx.TransportError) or reply.status_code == 500
            assert "the Ray actor of rank" in server.log()
        wait_until(lambda: cluster.free_cpus() == 2)
