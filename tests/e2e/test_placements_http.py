# SPDX-License-Identifier: Apache-2.0
"""A supernet on a server: placements over HTTP, and one checkpoint under a fixed pattern."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_placements(tmp_path: Path) -> None:
    decoder = stochastic(2)
    tensors = make_tensors(decoder)
    path = save(tmp_path, decoder, tensors)
    with RemoteServer(path, *FLAGS, "--placement", "all-kda") as server:
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
