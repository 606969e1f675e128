# SPDX-License-Identifier: Apache-2.0
"""What hosts compare before they become one engine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor import node_agreement
from vllm.v1.executor.node_agreement import agreement, check_versions, differences, versions
from vllm.v1.executor.node_messages import Hello

TWO = {"tensor_parallel_size": 2, "nnodes": 2}


def of(family: str = "qwen3_5", **flags: Any) -> dict[str, str]:
    model = str(tiny_model(family))
    return agreement(EngineArgs(model=model, **{**TWO, **flags}).create_engine_config())


def test_equal_flags_agree() -> None:
    """Whatever a start makes up, and what is each host's own."""
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/tmp/x"},
    }
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    }
    flags = {"kv_transfer_config": transfer, "speculative_config": speculative}
    here = of(**flags)
    own = {"node_rank": 1, "master_addr": "10.0.0.1", "master_port": 29502, "hf_token": "secret"}
    there = of(**flags, **own, served_model_name="name")
    assert "secret" not in str(there)
    assert differences(here, there, 1) is None
    assert json.loads(here["--tensor-parallel-size"]) == 2
    assert json.loads(here["--kv-transfer-config kv_role"]) == "kv_producer"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_model_len": 64}, "--max-model-len is 64 on node 3 and [0-9]+ on node 0"),
        ({"dtype": "float16"}, '--dtype is "torch.float16" on node 3 and "torch.bfloat16" on'),
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization is 0.5 on node 3"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "--speculative-config.* is .*2.* on node 3",
        ),
        ({"family": "llama"}, 'config.json of the model is .* --model is ".*llama'),
    ],
)
def test_what_differs_is_named_as_the_user_wrote_it(flags: dict[str, Any], words: str) -> None:
    text = differences(of(), of(**flags), 3)
    assert text is not None
    assert re.search(words, text), text


def test_a_copy_at_another_path_differs_in_its_path_alone(tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model("qwen3_5"), tmp_path / "copy")
    args = EngineArgs(model=str(copy), tokenizer=str(tiny_model("qwen3_5")), **TWO)
    text = differences(of(tokenizer=args.tokenizer), agreement(args.create_engine_config()), 1)
    assert text is not None and text.startswith(f'--model is "{copy}" on node 1 and '), text
    assert ";" not in text


@pytest.mark.parametrize("whose", ["model", "drafter"])
def test_other_weights_at_the_same_path(whose: str, tmp_path: Path) -> None:
    """Each host has its own disk; one may have to download what the other one has."""
    for name in ("model", "drafter"):
        shutil.copytree(tiny_model("qwen3_5"), tmp_path / name)
    drafter = {"model": str(tmp_path / "drafter"), "num_speculative_tokens": 1}

    def here() -> dict[str, str]:
        args = EngineArgs(model=str(tmp_path / "model"), speculative_config=drafter, **TWO)
        return agreement(args.create_engine_config())

    weights = next((tmp_path / whose).glob("*.safetensors"))
    first = here()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    text = differences(first, here(), 1)
    assert text is not None
    assert f"the last bytes of the {whose}'s weights is" in text
    weights.unlink()
    assert differences(first, here(), 1) is None
    config = tmp_path / whose / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": ', '"rope_theta": 2'))
    text = differences(first, here(), 1)
    assert text is not None
    assert f"config.json of the {whose} is" in text


def test_versions_and_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    here = of()
    monkeypatch.setattr(node_agreement, "__version__", "0.1")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    text = differences(here, of(), 1)
    assert text is not None
    assert f"vllm is 0.1 on node 1 and {here['vllm']} on node 0" in text
    assert "VLLM_PP_LAYER_PARTITION is [1, 3] on node 1 and null on node 0" in text


def test_versions_of_actors_are_compared() -> None:
    """Ray compares its own and Python's."""
    check_versions(versions(), "the Ray actor of rank 1")
    for theirs, words in (({**versions(), "torch": "1.0"}, "torch is 1.0 there"), ({}, "is older")):
        with pytest.raises(VLLMValidationError, match=f"the Ray actor of rank 1: .*{words}"):
            check_versions(theirs, "the Ray actor of rank 1")


def test_many_differences_are_counted() -> None:
    text = differences({str(n): "a" for n in range(9)}, {str(n): "b" for n in range(9)}, 1)
    assert text is not None and text.count(" is b on node 1") == 5 and text.endswith("; 4 more")


def test_a_hello_is_told_from_anything_else() -> None:
    hello = Hello(1, {"--model": '"m"'}, ["cpu"])
    assert Hello.decode(hello.encode()) == hello
    for words in (b"", b"GET /", b"{}", b"[]", b'{"protocol": "vllm-node-1"}', b"\xff\xfe"):
        assert Hello.decode(words) is None
    other = json.loads(hello.encode()) | {"protocol": "vllm-node-0"}
    assert Hello.decode(json.dumps(other).encode()) is None
