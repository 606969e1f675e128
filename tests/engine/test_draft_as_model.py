# SPDX-License-Identifier: Apache-2.0
"""A speculators checkpoint given as the model: its verifier is served, and it drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.apriel2_models import MAMBA, MIXERS, make_tensors, pattern, save
from tests.dflash_models import Block, write_dflash
from tests.draft_models import (
    TINY,
    mtp_tensors,
    write_eagle3,
    write_speculators_mtp,
)
from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import SpeculativeConfig
from vllm.config.draft_methods.eagle3 import Eagle3Settings
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.kernels.step import Progress
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.state_layers import collect_layers
from vllm.v1.spec_decode.drafter import attach_drafter, create_drafter

PROMPT = [(7 * i) % 251 for i in range(20)]


@pytest.fixture
def target() -> Path:
    return tiny_model("qwen3_5")


@pytest.fixture
def eagle3(target: Path, tmp_path: Path) -> Path:
    return write_eagle3(tmp_path / "eagle3", target, TINY, num_tokens=2)


def config_of(model: Path, **fields: Any) -> Any:
    return EngineArgs(model=str(model), dtype="float32", **fields).create_engine_config()


def test_eagle3(target: Path, eagle3: Path) -> None:
    config = config_of(eagle3)
    model, speculative = config.model_config, config.speculative_config
    assert (model.model, model.tokenizer) == (str(target), str(target))
    assert model.served_names == [str(eagle3), str(target)]
    assert (speculative.method, speculative.model) == ("eagle3", str(eagle3))
    assert speculative.num_speculative_tokens == 2
    assert isinstance(config.drafter, Eagle3Settings)
    assert config.drafter.layer_ids == (1, 2, 3)
    assert speculative.use_eagle() and config.tokens_to_verify == 3
    assert any(d.what == "model" and d.chosen == str(target) for d in config.decisions.decisions())


def test_what_is_said_is_stronger(eagle3: Path) -> None:
    given = {"num_speculative_tokens": 5}
    assert config_of(eagle3, speculative_config=given).tokens_to_verify == 6
    assert config_of(eagle3, spec_tokens=4).tokens_to_verify == 5
    assert config_of(eagle3, served_model_name="mine").model_config.served_names == ["mine"]


OTHER_DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"spec_method": "ngram"}, "method must be absent or eagle3 where the draft checkpoint"),
    ({"spec_model": "other"}, "model must be absent where .* is served; serve /.*, got other"),
    ({"speculative_config": {"method": "ngram"}}, "method must be absent or eagle3"),
    ({"speculative_config": {"model": "/other"}}, "model must be absent"),
    ({"speculative_config": '{"num_speculative_tokens": 1}'}, "must be a JSON object"),
    ({"speculative_config": {"num_speculative_tokens": 1}, "spec_tokens": 2}, "given both by"),
    ({"speculative_config": {"num_speculative_tokens": 0}}, "must be 1 to 15, got 0"),
]


@pytest.mark.parametrize(("fields", "message"), OTHER_DRAFTERS)
def test_another_drafter_is_refused(fields: dict[str, Any], message: str, eagle3: Path) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        config_of(eagle3, **fields)


def test_saying_what_the_checkpoint_is_changes_nothing(eagle3: Path) -> None:
    given = {"method": "eagle3", "model": f"{eagle3}/", "num_speculative_tokens": None}
    assert config_of(eagle3, speculative_config=given).tokens_to_verify == 3
    same = SpeculativeConfig(method="eagle3", model=str(eagle3), full_width=True)
    drafter = config_of(eagle3, speculative_config=same).drafter
    assert drafter.full_width and drafter.num_speculative_tokens == 2


def test_beside_its_target(target: Path, eagle3: Path) -> None:
    """The kind of checkpoint is the method."""
    config = config_of(target, speculative_config={"model": str(eagle3)})
    assert config.speculative_config.method == "eagle3"
    assert config.tokens_to_verify == 3
    small = {"model": str(tiny_model("llama")), "num_speculative_tokens": 2}
    assert config_of(target, speculative_config=small).speculative_config.uses_draft_model()


def test_no_verifier(target: Path, tmp_path: Path) -> None:
    path = write_eagle3(tmp_path, None, TINY)
    with pytest.raises(VLLMValidationError, match="names no verifier; serve the target with"):
        config_of(path)
    assert config_of(target, speculative_config={"model": str(path)}).tokens_to_verify == 4


def test_other_kinds_are_refused_by_name(eagle3: Path) -> None:
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps(config | {"speculators_model_type": "peagle"}))
    with pytest.raises(VLLMValidationError, match="drafting with peagle is not supported"):
        config_of(eagle3)


def test_every_recurrent_layer_of_a_draft_model_keeps_a_journal(tmp_path: Path) -> None:
    """Its own rejected tokens leave its state as they leave the target's."""
    decoder = pattern(["mamba", "attention"], MAMBA | MIXERS)
    draft = save(tmp_path, decoder, make_tensors(decoder))
    given = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    config = config_of(tiny_model("llama"), speculative_config=given)
    drafter = create_drafter(config, Progress.create(2, 3, torch.device("cpu")))
    assert drafter is not None
    (model,) = attach_drafter(drafter, torch.nn.Identity())
    layers = collect_layers(config, model)
    recurrent = [name for name, one in layers.items() if one.get_kv_cache_spec(config).is_recurrent]
    assert recurrent == [name for name, one in layers.items() if isinstance(one, KeepsJournal)]
    assert len(recurrent) == 1


def test_a_recurrent_draft_model_decides_the_dtype_of_its_state(target: Path) -> None:
    given = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 2}
    config = config_of(tiny_model("llama"), speculative_config=given)
    assert not config.model_config.is_hybrid
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"


def test_served(
    target: Path, eagle3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of checkpoints, with the target's text."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    mtp = write_speculators_mtp(tmp_path / "mtp", target, mtp_tensors(TINY))
    dflash = write_dflash(tmp_path / "dflash", target, TINY, Block())
    texts = []
    for model in (target, eagle3, mtp, dflash):
        llm = LLM(str(model), dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**25)
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], params, use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
        llm.llm_engine.engine_core.shutdown()
    assert texts[1:] == texts[:1] * 3
