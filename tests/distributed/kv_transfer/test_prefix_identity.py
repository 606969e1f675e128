# SPDX-License-Identifier: Apache-2.0
"""Whatever fixes the state of a prefix besides its tokens tells engines and their stores apart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.apriel2_models import make_tensors, pattern, save, stochastic, thinned
from tests.distributed.kv_transfer.offload_engines import (
    bits,
    drain,
    engine,
    offloading,
    prompt,
    run,
)
from tests.distributed.kv_transfer.test_offloading_parts import ATTENTION, cache_of
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileStore, store_identity
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import (
    HandshakeRefused,
    compare,
    peer_identity,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import model_identity
from vllm.engine.arg_utils import EngineArgs

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def config_of(model: Path, **options: Any) -> VllmConfig:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
    return EngineArgs(str(model), **{**settings, **options}).create_engine_config()


def capture(*layer_ids: int) -> dict[str, Any]:
    hf_config = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    saver = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    return {
        "speculative_config": {**speculation, "draft_model_config": {"hf_config": hf_config}},
        "kv_transfer_config": saver,
    }


def drafts(model: Path) -> dict[str, Any]:
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    return {"speculative_config": draft}


def copy_of(model: Path, target: Path) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    weights = load_file(path)
    name = max(weights)
    weights[name] = weights[name] + 1
    save_file(weights, path)
    return target


def test_a_placement_counts_however_it_is_spelled(tmp_path: Path) -> None:
    supernet = save(tmp_path / "net", stochastic(2), make_tensors(stochastic(2)))
    told = [
        model_identity(config_of(supernet, placement=placement))["placement"]
        for placement in (None, "all-attn", "attention, attention", "every2nd-gdn")
    ]
    assert told == ["attention,attention"] * 3 + ["attention,gdn"]
    some = save(tmp_path / "thinned", thinned(), make_tensors(thinned()))
    assert model_identity(config_of(some, placement="gdn,gdn,x"))["placement"] == "gdn,gdn,_"
    fixed = save(tmp_path / "fixed", pattern(["gdn"]), make_tensors(pattern(["gdn"])))
    for model in (fixed, tiny_model("llama")):
        assert model_identity(config_of(model))["placement"] is None


def differ(tmp_path: Path, case: str) -> tuple[VllmConfig, VllmConfig]:
    """Two engines with layers of the same names and sizes."""
    llama = tiny_model("llama")
    cases: dict[str, Callable[[], tuple[VllmConfig, VllmConfig]]] = {
        "model_config": lambda: (
            config_of(llama),
            config_of(llama, hf_overrides={"rope_parameters": {**YARN, "rope_theta": 5e5}}),
        ),
        "captured_layers": lambda: (
            config_of(llama, **capture(0, 1)),
            config_of(llama, **capture(0, 2)),
        ),
        "drafter": lambda: (
            config_of(llama, **drafts(llama)),
            config_of(llama, **drafts(copy_of(llama, tmp_path / "draft"))),
        ),
        "weights": lambda: (config_of(llama), config_of(copy_of(llama, tmp_path / "other"))),
        "placement": lambda: tuple(
            config_of(
                save(tmp_path / "net", stochastic(2), make_tensors(stochastic(2))), placement=name
            )
            for name in ("all-attention", "all-swa")
        ),
        "dtype": lambda: (config_of(llama), config_of(llama, dtype="bfloat16")),
    }
    return cases[case]()


@pytest.mark.parametrize(
    "case", ["model_config", "captured_layers", "drafter", "weights", "placement", "dtype"]
)
def test_each_of_them_counts(case: str, tmp_path: Path) -> None:
    one, other = differ(tmp_path, case)
    cache = cache_of(ATTENTION)
    assert store_identity(one, cache) == store_identity(one, cache)
    stores = [FileStore(str(tmp_path), store_identity(c, cache), 0) for c in (one, other)]
    assert stores[0].path("g0-00") != stores[1].path("g0-00")
    with pytest.raises(HandshakeRefused, match=f"than this engine: {case}"):
        compare(peer_identity(one, cache), peer_identity(other, cache), "the other")
    assert example_connector._scope(one) != example_connector._scope(other)


def test_a_drafter_without_state_does_not_count() -> None:
    llama, ngram = tiny_model("llama"), {"method": "ngram", "num_speculative_tokens": 2}
    plain, drafting = config_of(llama), config_of(llama, speculative_config=ngram)
    assert model_identity(plain) == model_identity(drafting)


@pytest.mark.parametrize("names", [("auto", "float32"), ("fp8", "fp8_e4m3")])
def test_a_cache_dtype_counts_however_it_is_spelled(names: tuple[str, str]) -> None:
    identities = [
        model_identity(config_of(tiny_model("llama"), kv_cache_dtype=name))
        for name in (*names, "bfloat16")
    ]
    assert identities[0] == identities[1] != identities[2]


def test_files_follow_the_time_of_the_weights(tmp_path: Path) -> None:
    """Training may change what lies far from a file's end; peers' clocks say nothing."""
    config, cache = config_of(copy_of(tiny_model("llama"), tmp_path / "m")), cache_of(ATTENTION)
    stored, told = store_identity(config, cache), peer_identity(config, cache)
    os.utime(tmp_path / "m" / "model.safetensors", (1, 1))
    assert store_identity(config, cache) != stored
    assert peer_identity(config, cache) == told


def test_weights_of_the_hub_are_those_on_this_machine(tmp_path: Path) -> None:
    """The branch of a name may move to other weights."""
    llama = tiny_model("llama")
    hub = tmp_path / "models--own--name"
    (hub / "refs").mkdir(parents=True)
    found = []
    for commit in ("1" * 40, "2" * 40):
        (hub / "refs" / "main").write_text(commit)
        copy_of(llama, hub / "snapshots" / commit)
        torch.manual_seed(int(commit[0]))
        weights = {"a": torch.rand(3)}
        save_file(weights, hub / "snapshots" / commit / "model.safetensors")
        config = config_of(llama, download_dir=str(tmp_path))
        config.model_config.model = "own/name"
        found.append(model_identity(config)["weights"])
    assert found[0] != found[1] and found[0][0][0] == "model.safetensors"
    config.model_config.model = "own/absent"
    assert model_identity(config)["weights"] == ["own/absent", "None"]


@pytest.mark.slow
def test_a_restart_with_another_rotation_finds_nothing(tmp_path: Path) -> None:
    changed = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}}
    tokens = prompt(1, 40)
    with engine(None, "llama", **changed) as llm:
        expected = bits(run(llm, tokens))
    with engine(offloading(root=tmp_path), "llama") as llm:
        assert bits(run(llm, tokens)) != expected
        drain(llm)
    with engine(offloading(root=tmp_path), "llama", **changed) as llm:
        outputs = run(llm, tokens)
        assert bits(outputs) == expected and outputs[0].num_cached_tokens == 0
