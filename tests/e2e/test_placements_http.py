# SPDX-License-Identifier: Apache-2.0
"""A supernet on a server: placements over HTTP, and one checkpoint under a fixed pattern."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.apriel2_models import MIXERS, Reference, make_tensors, pattern, save, stochastic
from tests.e2e.remote_server import RemoteServer

pytestmark = pytest.mark.e2e

PROMPT = [5, 6, 7] * 10
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
BODY |= {"ignore_eos": True}
FLAGS = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]


def expected(reference: Reference) -> list[int]:
    ids = list(PROMPT)
    for _ in range(8):
        ids.append(int(reference.logits(ids)[-1].argmax()))
    return ids[len(PROMPT) :]


def requests_choose(server: RemoteServer, tokens_of: Callable[[list[str]], list[int]]) -> None:
    """By the name of an alias, as model or in the field, or by any placement that fits; all at
    once, and as the equations say."""
    cards = {card["id"]: card for card in server.get("/v1/models")["data"]}
    assert list(cards) == ["main", "fast", "mixed"]
    assert cards["main"]["parent"] is None and cards["fast"]["parent"] == "main"
    chosen: list[tuple[dict[str, Any], list[str]]] = [
        ({"model": "main"}, ["kda", "kda"]),
        ({"model": "fast"}, ["gdn", "gdn"]),
        ({"placement": "mixed"}, ["attention", "kda"]),
        ({"model": "fast", "placement": "fast"}, ["gdn", "gdn"]),
        ({"placement": "gdn,attention"}, ["gdn", "attention"]),
    ]
    with ThreadPoolExecutor(len(chosen)) as pool:
        ask = partial(server.post, "/v1/completions", **BODY)
        replies = [pool.submit(ask, **fields) for fields, _ in chosen]
    for reply, (fields, names) in zip(replies, chosen, strict=True):
        assert reply.result()["choices"][0]["token_ids"] == tokens_of(names), fields
        assert reply.result()["model"] == fields.get("model", "main")
    shown = {one["what"]: one["chosen"] for one in server.get("/decisions")}
    graphs = shown["graphs of a placement without an alias"]
    assert graphs == "none for gdn,attention, the last one that came"
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for wrong in ("all-x", ["gdn"], ["gdn", 1]):
        for path, prompt in (("/v1/completions", BODY), ("/v1/chat/completions", chat)):
            for stream in (False, True):
                asked = {**prompt, "placement": wrong, "stream": stream}
                error = server.post(path, status=400, **asked)["error"]
                assert error["param"].startswith("placement")
    both = {"model": "fast", "placement": "all-kda"}
    error = server.post("/v1/completions", status=400, **BODY, **both)["error"]
    assert "the model 'fast' is a placement" in error["message"]
    for names, model in ((["gdn", "gdn"], "fast"), (["kda", "kda"], "main")):
        beams = server.post("/v1/completions", **BODY, model=model, use_beam_search=True)
        assert beams["choices"][0]["token_ids"] == tokens_of(names), "one beam is greedy"
    assert server.get("/placements")["placements"] == {"0": "kda", "1": "kda"}


def test_placements(tmp_path: Path) -> None:
    decoder = stochastic(2)
    tensors = make_tensors(decoder)
    path = save(tmp_path, decoder, tensors)
    aliases = ["--placement-alias", "fast=all-gdn", "mixed=attention,kda"]
    flags = [*FLAGS, "--placement", "all-kda", "--served-model-name", "main", *aliases]
    with RemoteServer(path, *flags) as server:
        requests_choose(server, lambda names: expected(Reference(decoder, tensors, names)))
        for placement in (["kda", "kda"], "all-gdn", ["sliding_window", "attention"]):
            reply = server.post("/placements", placement=placement)
            names = ["gdn", "gdn"] if isinstance(placement, str) else placement
            assert reply == {"placements": {"0": names[0], "1": names[1]}, "mixers": list(MIXERS)}
            assert server.get("/placements") == reply
            choice = server.post("/v1/completions", **BODY)["choices"][0]
            assert choice["token_ids"] == expected(Reference(decoder, tensors, names))
        error = server.post("/placements", status=400, placement="all-mamba")["error"]
        assert "layer 0 has no mixer 'mamba'; it has attention" in error["message"]
        assert error["param"] == "placement"
        assert server.get("/placements") == reply
        assert server.post("/placements", status=400, placement="all-gdn", mode="now")["error"]


def test_several_processes(tmp_path: Path) -> None:
    """None of them can hold back the others' requests, so that new ones start beside the old. All
    of them know of a change."""
    decoder = stochastic(2)
    tensors = make_tensors(decoder)
    path = save(tmp_path, decoder, tensors)
    flags = [*FLAGS, "--api-server-count", "2", "--placement-alias", "fast=all-gdn"]
    with RemoteServer(path, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        for mode in ("wait", "refuse"):
            error = server.post("/placements", status=400, placement="all-gdn", mode=mode)["error"]
            assert "with mode 'overlap', or start the engine with --api-s" in error["message"]
            assert error["param"] == "mode"
        error = server.post("/placements", status=400, placement="all-x", mode="overlap")["error"]
        assert "layer 0 has no mixer 'x'" in error["message"]
        for placement, names in (("gdn,swa", ["gdn", "sliding_window"]), ("fast", ["gdn"] * 2)):
            reply = server.post("/placements", placement=placement, mode="overlap")
            assert reply["placements"] == {"0": names[0], "1": names[1]}
            assert all(server.get("/placements") == reply for _ in range(4))
            with ThreadPoolExecutor(6) as pool:
                replies = list(pool.map(lambda _: server.post("/v1/completions", **BODY), range(6)))
            tokens = expected(Reference(decoder, tensors, names))
            assert [one["choices"][0]["token_ids"] for one in replies] == [tokens] * 6
            assert shown_placements(server) == {"all-gdn" if placement == "fast" else placement}
        first, *_ = started(server)
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while len(started(server)) < 3:
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.02)
        assert shown_placements(server) == {"all-gdn"}, "also in the process that takes its place"


def test_several_processes_and_replicas(tmp_path: Path) -> None:
    """No mode is possible, and none is recommended."""
    decoder = stochastic(2)
    path = save(tmp_path, decoder, make_tensors(decoder))
    with RemoteServer(path, *FLAGS, "--api-server-count", "2", "-dp", "2") as server:
        for mode in ("wait", "refuse", "overlap"):
            error = server.post("/placements", status=400, placement="all-gdn", mode=mode)["error"]
            assert "start the engine with --api-server-count 1" in error["message"]
            assert not re.search("with mode 'overlap'|; use 'wait'", error["message"])
            assert error["param"] == "mode"


def shown_placements(server: RemoteServer) -> set[str]:
    """What several connections are told of it."""
    infos = (server.get("/server_info?config_format=json") for _ in range(8))
    return {info["vllm_config"]["model_config"]["placement"] for info in infos}


def started(server: RemoteServer) -> list[int]:
    """Ids of the API processes that have ever served."""
    return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", server.log())]


def test_a_fixed_pattern(tmp_path: Path) -> None:
    """The supernet's tensors under another decoder, as Fast-LLM's plugin was used."""
    decoder = stochastic(2)
    tensors = make_tensors(decoder)
    path = save(tmp_path, decoder, tensors)
    names = ["gdn", "sliding_window"]
    override = json.dumps({"decoder": pattern(names)})
    with RemoteServer(path, *FLAGS, "--hf-overrides", override) as server:
        choice = server.post("/v1/completions", **BODY)["choices"][0]
        assert choice["token_ids"] == expected(Reference(decoder, tensors, names))
        error = server.post("/placements", status=400, placement="all-gdn")["error"]
        assert "no supernet" in error["message"]
