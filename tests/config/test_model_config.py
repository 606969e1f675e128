# SPDX-License-Identifier: Apache-2.0
"""ModelConfig: dtype, length, overrides, sampling defaults, errors."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.checkpoints import HYBRID, write_config
from tests.tiny_models import tiny_model
from vllm import decisions
from vllm.config import ModelConfig, ParallelConfig
from vllm.exceptions import VLLMValidationError


def chosen(what: str) -> str | None:
    return next((d.chosen for d in decisions.decisions() if d.what == what), None)


def test_sizes_of_a_plain_model(llama: str) -> None:
    model, parallel = ModelConfig(llama), ParallelConfig()
    assert model.dtype is torch.bfloat16
    assert model.max_model_len == 512 and not model.max_model_len_auto
    assert model.tokenizer == llama and model.served_names == [llama]
    assert model.architectures == ["LlamaForCausalLM"] and not model.is_hybrid
    assert model.get_num_layers(parallel) == 4
    assert (model.get_num_kv_heads(parallel), model.get_head_size()) == (2, 16)
    assert (model.get_hidden_size(), model.get_vocab_size()) == (64, 300)
    assert model.hf_text_config is model.hf_config and not model.use_mla


def test_paths_are_accepted(llama: str) -> None:
    model = ModelConfig(Path(llama), tokenizer=Path("/t"))  # type: ignore[arg-type]
    assert (model.model, model.tokenizer) == (llama, "/t")


@pytest.mark.parametrize("names", [[""], ["a", ""]])
def test_an_empty_served_name_is_refused(llama: str, names: list[str]) -> None:
    """As of a variable that is not set: --served-model-name "$NAME"."""
    with pytest.raises(VLLMValidationError, match="--served-model-name: a name is empty"):
        ModelConfig(llama, served_model_name=names)


def test_sizes_come_from_the_text_part(hybrid: str) -> None:
    model = ModelConfig(hybrid)
    assert model.is_hybrid and model.hf_text_config is model.hf_config.text_config
    assert (model.get_hidden_size(), model.get_num_layers()) == (64, 4)


DTYPES: list[tuple[Any, str | None, Any]] = [
    ("auto", "bfloat16", torch.bfloat16),
    ("auto", "float16", torch.float16),
    ("auto", "float32", torch.bfloat16),
    ("auto", None, torch.bfloat16),
    ("half", "bfloat16", torch.float16),
    ("float", "bfloat16", torch.float32),
    ("float32", None, torch.float32),
    (torch.float16, "bfloat16", torch.float16),
]


@pytest.mark.parametrize(("wanted", "stored", "result"), DTYPES)
def test_dtype(tmp_path: Path, wanted: Any, stored: str | None, result: torch.dtype) -> None:
    model = ModelConfig(write_config(tmp_path, dtype=stored), dtype=wanted)
    assert model.dtype is result
    narrowed = wanted == "auto" and stored in ("float32", None)
    assert (chosen("dtype") is not None) == narrowed


@pytest.mark.parametrize("wanted", ["int8", "fp8", torch.int64, torch.float64, 3])
def test_dtype_refused(llama: str, wanted: Any) -> None:
    with pytest.raises(VLLMValidationError, match="--dtype"):
        ModelConfig(llama, dtype=wanted)


def test_dtype_of_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = write_config(tmp_path, dtype=None)
    save_file({"a": torch.zeros(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert ModelConfig(path).dtype is torch.float16


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LENGTHS: list[tuple[dict[str, Any], Any, int]] = [
    ({}, None, 512),
    ({}, 100, 100),
    ({}, 512, 512),
    ({}, -1, 512),
    ({}, "auto", 512),
    ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, None, 1024),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, None, 1024),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024, 1024),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        None,
        512,
    ),
]


@pytest.mark.parametrize(("changes", "wanted", "result"), LENGTHS)
def test_max_model_len(tmp_path: Path, changes: dict[str, Any], wanted: Any, result: int) -> None:
    model = ModelConfig(write_config(tmp_path, **changes), max_model_len=wanted)
    assert model.max_model_len == result
    assert model.max_model_len_auto == (wanted in (-1, "auto"))


def test_longer_than_the_model(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "--max-model-len 513.*limit 512 .*max_position_embeddings.*VLLM_ALLOW_LONG"
    with pytest.raises(VLLMValidationError, match=message):
        ModelConfig(llama, max_model_len=513)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert ModelConfig(llama, max_model_len=513).max_model_len == 513
    assert chosen("max_model_len") == "513"


@pytest.mark.parametrize("wanted", [0, -2, "long", 1.5])
def test_bad_lengths(llama: str, wanted: Any) -> None:
    with pytest.raises(VLLMValidationError, match="max-model-len"):
        ModelConfig(llama, max_model_len=wanted)


def test_overrides_reach_the_text_part(hybrid: str) -> None:
    overrides = {
        "num_hidden_layers": 2,
        "text_config": {"vocab_size": 77, "rope_parameters": {"rope_theta": 5.0}},
    }
    model = ModelConfig(hybrid, hf_overrides=overrides)
    assert (model.get_num_layers(), model.get_vocab_size()) == (2, 77)
    assert model.hf_text_config.rope_parameters["rope_theta"] == 5.0
    assert model.hf_text_config.rope_parameters["rope_type"] == "default"
    assert model.hf_text_config.layer_types == ["linear_attention"] * 2


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"factor": 2.0}},
        {"text_config": {"rope_theta": 5.0}},
    ],
)
def test_override_for_none_of_several_rotations(overrides: dict[str, Any]) -> None:
    path = str(tiny_model("gemma3_wrapper"))
    with pytest.raises(VLLMValidationError, match="for one of the model's rotations, such as"):
        ModelConfig(path, hf_overrides=overrides)
    full = {"rope_parameters": {"full_attention": {"factor": 2.0}}}
    rope = ModelConfig(path, hf_overrides=full).hf_text_config.rope_parameters
    assert [rope[kind].get("factor") for kind in sorted(rope)] == [2.0, None]


def test_override_of_a_partial_rotation() -> None:
    path = str(tiny_model("qwen3_5"))
    config = ModelConfig(path, hf_overrides={"partial_rotary_factor": 0.5}).hf_text_config
    assert config.rope_parameters["partial_rotary_factor"] == 0.5


def test_override_of_rope_scaling_uses_the_present_name(llama: str) -> None:
    model = ModelConfig(llama, hf_overrides={"rope_scaling": YARN, "rope_theta": 7.0})
    assert model.max_model_len == 1024
    assert model.hf_config.rope_parameters == {**YARN, "rope_theta": 7.0}


def test_callable_overrides(llama: str) -> None:
    def change(config: Any) -> Any:
        config.num_hidden_layers = 1
        return config

    model = ModelConfig(llama, hf_overrides=change)
    assert model.get_num_layers() == 1
    assert pickle.loads(pickle.dumps(model)).get_num_layers() == 1


BAD_OVERRIDES: list[tuple[Any, str]] = [
    ([1], "--hf-overrides must be"),
    ({"num_hidden_layers": 9}, "9 is more than the 4 entries of layer_types"),
    ({"vocab_size": "many"}, "vocab_size"),
    (lambda config: None, "must return the config"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_OVERRIDES)
def test_bad_overrides(hybrid: str, overrides: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        ModelConfig(hybrid, hf_overrides=overrides)


def test_pickling_keeps_everything(hybrid: str) -> None:
    model = ModelConfig(hybrid, served_model_name=["a", "b"])
    twin = pickle.loads(pickle.dumps(model))
    assert twin.hf_config.to_dict() == model.hf_config.to_dict()
    assert twin.served_names == ["a", "b"] and twin.dtype is model.dtype
    assert twin.model_arch_config == model.model_arch_config


def test_sampling_defaults(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert ModelConfig(path).get_diff_sampling_param() == {}
    settings = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": [4, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    expected = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert ModelConfig(path).get_diff_sampling_param() == expected
    assert ModelConfig(path).try_get_generation_config()["eos_token_id"] == [4, 5]
    changed = ModelConfig(path, override_generation_config={"top_k": 3, "top_p": 0.5})
    assert changed.get_diff_sampling_param() == {**expected, "top_k": 3, "top_p": 0.5}
    assert ModelConfig(path, generation_config="vllm").get_diff_sampling_param() == {}


def recorded(path: str, **options: Any) -> dict[str, str | None]:
    decisions.clear()
    ModelConfig(path, **options).record_generation_config()
    return {d.what: d.instead_of for d in decisions.decisions()}


def test_what_is_not_served_of_a_generation_config_is_recorded(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    settings = {
        "do_sample": False,
        "top_k": 20,
        "eos_token_id": 4,
        "pad_token_id": 3,
        "use_cache": True,
        "num_beams": 1,
        "suppress_tokens": [7, 8],
        "min_new_tokens": 3,
        "no_repeat_ngram_size": 2,
        "a_models_own": "x",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    ignored = "min_new_tokens: 3, no_repeat_ngram_size: 2, suppress_tokens: [7, 8]"
    assert recorded(path) == {"generation config": f"a_models_own: x, do_sample: False, {ignored}"}
    assert ModelConfig(path).get_diff_sampling_param() == {"top_k": 20}
    assert recorded(path, generation_config="vllm") == {}


def test_sampling_defaults_from_elsewhere(tmp_path: Path) -> None:
    path, other = write_config(tmp_path / "m"), tmp_path / "other"
    other.mkdir()
    model = ModelConfig(path, generation_config=str(other))
    with pytest.raises(VLLMValidationError, match="generation_config.json"):
        model.get_diff_sampling_param()
    (other / "generation_config.json").write_text('{"top_p": 0.25}')
    assert model.get_diff_sampling_param() == {"top_p": 0.25}


def test_generation_config_is_read_once(tmp_path: Path) -> None:
    """All who ask, also in the engine's process, know the same, whatever becomes of the file."""
    model = ModelConfig(write_config(tmp_path))
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_k": 20, "eos_token_id": [4, 5]}')
    assert model.get_diff_sampling_param() == {"top_k": 20}
    file.unlink()
    for each in (model, pickle.loads(pickle.dumps(model))):
        assert each.try_get_generation_config()["eos_token_id"] == [4, 5]
    model.override_generation_config = {"top_k": 3}
    assert model.get_diff_sampling_param() == {"top_k": 3}


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "2"}', '{"eos_token_id": [1, "2"]}'])
def test_broken_generation_config(tmp_path: Path, text: str) -> None:
    path = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(VLLMValidationError, match="generation_config.json .*cannot be used"):
        ModelConfig(path).get_diff_sampling_param()


@pytest.mark.parametrize(
    ("window", "kinds", "result"),
    [
        (None, None, None),
        (64, ["sliding_attention"] * 4, 64),
        (64, ["sliding_attention", "full_attention"] * 2, None),
    ],
)
def test_shared_window(
    tmp_path: Path, window: int | None, kinds: list[str] | None, result: int | None
) -> None:
    path = write_config(tmp_path, sliding_window=window, layer_types=kinds)
    assert ModelConfig(path).get_sliding_window() == result


@pytest.mark.parametrize("value", [None, 0, -1])
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_missing_size_is_named(tmp_path: Path, field: str, value: int | None) -> None:
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import convert

    config = get_config(write_config(tmp_path))
    config.__dict__[field] = value
    with pytest.raises(VLLMValidationError, match=f"{field}.*got {value}"):
        convert(config, config)


@pytest.mark.parametrize("field", ["head_dim", "num_key_value_heads"])
def test_a_size_of_nothing_is_named(tmp_path: Path, field: str) -> None:
    """Division by it ended the process."""
    with pytest.raises(VLLMValidationError, match=f"no usable {field} .*got 0"):
        ModelConfig(write_config(tmp_path, **{field: 0}))


def test_max_logprobs(llama: str) -> None:
    assert ModelConfig(llama, max_logprobs=-1).max_logprobs == -1
    with pytest.raises(VLLMValidationError, match="--max-logprobs"):
        ModelConfig(llama, max_logprobs=-2)


def test_wrapper_dtype_is_read_from_either_part(tmp_path: Path) -> None:
    text = {**HYBRID["text_config"], "dtype": "float16"}  # type: ignore[dict-item]
    assert ModelConfig(write_config(tmp_path, "hybrid", text_config=text)).dtype is torch.float16


def test_token_reaches_the_hub_client(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "old")
    ModelConfig(llama)
    ModelConfig(llama, hf_token=True)
    assert os.environ["HF_TOKEN"] == "old"
    ModelConfig(llama, hf_token="new")
    assert os.environ["HF_TOKEN"] == "new"


def test_serving_the_text_part_is_recorded(llama: str, hybrid: str) -> None:
    ModelConfig(llama)
    assert chosen("multimodal input") is None
    ModelConfig(hybrid)
    assert chosen("multimodal input") == "none"
