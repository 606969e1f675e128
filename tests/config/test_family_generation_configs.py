# SPDX-License-Identifier: Apache-2.0
"""Generation configs as released families ship them, and what `--generation-config` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_configs import CONFIGS, FAMILIES, VOCAB_SIZE
from tests.v1.engine.tokenizer_fixture import make_tokenizer
from vllm.config import ModelConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

#: sampling settings and the number of end-of-sequence ids, as released
_QWEN2 = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
_QWEN3 = ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, 2)
_QWEN3_5 = ({"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}, 2)
_GEMMA = ({"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95}, 2)
_NOTHING = ({"_from_model_config": True}, 1)
_GRANITE = ({"_from_model_config": True, "do_sample": False}, 1)
RELEASED: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, 3),
    "llama3_rope": ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, 3),
    "qwen2": ({**_QWEN2, "repetition_penalty": 1.05}, 2),
    "qwen3": _QWEN3,
    "qwen3_sliding": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_next": (_QWEN2, 2),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_tied": _QWEN3_5,
    "qwen3_5_wide": _QWEN3_5,
    "qwen3_5_wrapper": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_wrapper": _QWEN3_5,
    "mistral": _NOTHING,
    "mixtral": _NOTHING,
    "bamba": _NOTHING,
    "falcon_h1": ({"do_sample": True, "temperature": 0.1, "repetition_penalty": 1.05}, 2),
    "granite_h": _GRANITE,
    "granite_h_dense": _GRANITE,
    "nemotron_h": ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, 3),
    "nemotron_h_moe": ({"do_sample": True, "temperature": 1.0, "top_p": 1.0}, 2),
    "gpt_oss": ({"do_sample": True}, 3),
    "gemma3": _GEMMA,
    "gemma3_wrapper": _GEMMA,
    "olmo_hybrid": ({"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 30}, 2),
    "deepseek_v2": ({"do_sample": True, "temperature": 0.3, "top_p": 0.95}, 1),
    "deepseek_v3": ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, 1),
    "deepseek_v4": ({"do_sample": True, "temperature": 1.0, "top_p": 1.0}, 1),
    "kimi_linear": ({"max_length": 4096}, 1),
}
#: what a released config says of sampling, in the names of requests
NAMES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
NAMES |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def save(path: Path, family: str, **changes: Any) -> str:
    """The family's `config.json`, and no weights."""
    config = CONFIGS[family]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "float32"
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(path)
    return str(path)


def ids(count: int) -> int | list[int]:
    """End-of-sequence ids as configs spell them: one alone, or a list; none is the tokenizer's."""
    listed = [VOCAB_SIZE - 1 - index for index in range(count)]
    return listed[0] if count == 1 else listed


def ends(path: str, **settings: Any) -> set[int]:
    """What ends a request of a server with these settings, besides the tokenizer's id."""
    model = ModelConfig(path, max_model_len=64, **settings)
    tokenizer = make_tokenizer()
    processor = InputProcessor(VllmConfig(model_config=model), tokenizer)
    params = processor.process("id", [1, 2, 3], SamplingParams()).request.sampling_params
    assert tokenizer.eos_token_id in params.all_stop_token_ids
    return set(params.all_stop_token_ids) - {tokenizer.eos_token_id}


def as_set(found: int | list[int]) -> set[int]:
    return {found} if isinstance(found, int) else set(found)


def test_every_family_is_listed() -> None:
    assert set(RELEASED) == set(FAMILIES), (
        "say in RELEASED what the family's released generation_config.json has, and how many "
        "end-of-sequence ids; `_NOTHING` where there is none"
    )


@pytest.mark.parametrize("family", RELEASED)
def test_the_files_settings_hold(family: str, tmp_path: Path) -> None:
    settings, count = RELEASED[family]
    path = save(tmp_path, family)
    released = {**settings, "eos_token_id": ids(count), "transformers_version": "4.57.1"}
    (tmp_path / "generation_config.json").write_text(json.dumps(released))
    read = GenerationConfig.from_pretrained(path)
    assert read.eos_token_id is not None
    sampling = {name: settings[key] for key, name in NAMES.items() if key in settings}
    assert ModelConfig(path).get_diff_sampling_param() == sampling
    assert ends(path) == as_set(read.eos_token_id) == as_set(ids(count))
    # Without sampling defaults a model ends its turns as before.
    assert ModelConfig(path, generation_config="vllm").get_diff_sampling_param() == {}
    assert ends(path, generation_config="vllm") == as_set(ids(count))


def test_another_source_and_overrides(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "gemma3_wrapper")
    own = {"top_k": 64, "eos_token_id": [200, 201]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(own))
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert ends(path, generation_config=str(other)) == {200, 201}
    model = ModelConfig(path, generation_config=str(other), override_generation_config={"top_k": 3})
    assert model.get_diff_sampling_param() == {"top_p": 0.5, "top_k": 3}
    (other / "generation_config.json").write_text('{"eos_token_id": 202}')
    assert ends(path, generation_config=str(other)) == {202}
    assert ends(path, override_generation_config={"eos_token_id": [203]}) == {203}


@pytest.mark.parametrize("family", ["gemma3", "gemma3_wrapper", "deepseek_v3", "kimi_linear"])
def test_a_checkpoint_without_the_file_ends_as_its_config_says(family: str, tmp_path: Path) -> None:
    path = save(tmp_path, family, eos_token_id=[200, 201])
    for source in ("auto", "vllm"):
        assert ends(path, generation_config=source) == {200, 201}
    assert ModelConfig(path).get_diff_sampling_param() == {}
