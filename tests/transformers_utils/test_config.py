# SPDX-License-Identifier: Apache-2.0
"""Reading of model configs: every failure is one clear sentence."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, dynamic_module_utils

from tests.config.checkpoints import LLAMA, write_config
from tests.forked_python import run_python
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils import config as config_module
from vllm.transformers_utils.config import (
    get_config,
    get_generation_config,
    get_hf_text_config,
    merged,
)
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
    convert,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local directory must never lead to a download."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("network access")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refuse)


def test_local_directory(tmp_path: Path) -> None:
    config = get_config(write_config(tmp_path))
    assert isinstance(config, LlamaConfig) and config.hidden_size == 64
    assert get_hf_text_config(config) is config


def test_the_length_of_a_scaled_rotation_may_stand_beside_it(tmp_path: Path) -> None:
    fields = {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "rope_theta": 5e3,
        "original_max_position_embeddings": 64,
    }
    config = get_config(write_config(tmp_path, **fields))
    assert config.rope_parameters["original_max_position_embeddings"] == 64


BROKEN: list[tuple[str | None, str]] = [
    (None, "holds no config.json"),
    ("", "not valid JSON"),
    ("{", "not valid JSON"),
    ("[1]", "must hold a JSON object"),
    ("{}", "cannot be used"),
    ('{"model_type": "nonsense"}', "model_type 'nonsense'.* does not know this type; a newer one"),
    (json.dumps({**LLAMA, "hidden_size": "big"}), "hidden_size"),
    (json.dumps({**LLAMA, "dtype": "torch.half"}), "has no attribute 'torch.half'"),
    (
        '{"model_type": "foo", "auto_map": {"AutoConfig": "configuration_foo.Foo"}}',
        "needs --trust-remote-code",
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=str)
def test_broken_directories(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(VLLMValidationError, match=message) as caught:
        get_config(str(tmp_path))
    assert caught.value.parameter == "model" and "\n" not in str(caught.value)
    assert tmp_path.name in str(caught.value)


MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ({"quantization": MODELOPT}, {"quant_method": "modelopt", **MODELOPT}),
        ({"quantization": {**MODELOPT, "quant_algo": None}}, None),
    ],
)
def test_modelopts_own_file(
    tmp_path: Path, stored: dict[str, Any], found: dict[str, Any] | None
) -> None:
    """Older checkpoints of it say nothing in config.json, which goes before where it does."""
    path = write_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stored))
    assert getattr(get_config(path), "quantization_config", None) == found
    other = {"quant_method": "fp8"}
    assert (
        get_config(write_config(tmp_path, quantization_config=other)).quantization_config == other
    )


def test_the_other_name_of_a_compressed_checkpoints_configuration(tmp_path: Path) -> None:
    groups = {"config_groups": {"group_0": {"targets": ["Linear"]}}}
    path = write_config(tmp_path, compression_config=groups)
    found = {"quant_method": "compressed-tensors", **groups}
    assert get_config(path).quantization_config == found
    other = {"quant_method": "fp8"}
    path = write_config(tmp_path, compression_config=groups, quantization_config=other)
    assert get_config(path).quantization_config == other


@pytest.mark.parametrize("text", ["{", "{}", '{"quantization": 1}'])
def test_a_broken_file_of_modelopt(tmp_path: Path, text: str) -> None:
    path = write_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(VLLMValidationError, match=r"hf_quant_config.json cannot be used"):
        get_config(path)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"")
    with pytest.raises(VLLMValidationError, match="is a file; give the directory"):
        get_config(str(path))


def test_missing_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VLLMValidationError, match="'/no/such/dir' .*: give the directory"):
        get_config("/no/such/dir")


def test_registered_types_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MyConfig(LlamaConfig):
        model_type = "my_llama"

    monkeypatch.setitem(config_module._CONFIG_REGISTRY, "my_llama", MyConfig)
    config = get_config(write_config(tmp_path, model_type="my_llama"))
    assert isinstance(config, MyConfig) and config.hidden_size == 64


def test_remote_code_reaches_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    auto_map = {"AutoConfig": "configuration_mine.MineConfig"}
    path = write_config(tmp_path, model_type="mine", auto_map=auto_map)
    sent = tmp_path / "sent"

    def send() -> None:
        dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path / "modules")
        sent.write_bytes(pickle.dumps(ModelConfig(path, trust_remote_code=True)))

    sender = multiprocessing.get_context("fork").Process(target=send)
    sender.start()
    sender.join(60)
    assert sender.exitcode == 0
    receiver = tmp_path / "receiver.py"
    receiver.write_text(
        "import pickle, sys\n"
        "from transformers import dynamic_module_utils\n"
        "dynamic_module_utils.HF_MODULES_CACHE = sys.argv[2]\n"
        "config = pickle.load(open(sys.argv[1], 'rb')).hf_config\n"
        "print(type(config).__name__, config.hidden_size)\n"
    )
    done = run_python(str(receiver), str(sent), str(tmp_path / "modules"))
    assert done.stdout.split() == ["MineConfig", "64"], done.stderr


def test_convertors_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(ModelArchConfigConvertorBase):
        def get_head_size(self) -> int:
            return 99

    monkeypatch.setitem(MODEL_ARCH_CONFIG_CONVERTORS, "llama", Mine)
    config = get_config(write_config(tmp_path))
    assert convert(config, config).head_size == 99


@pytest.mark.parametrize(
    ("kinds", "hybrid"),
    [
        (None, False),
        (["full_attention"] * 4, False),
        (["sliding_attention", "full_attention"] * 2, False),
        (["linear_attention"] + ["full_attention"] * 3, True),
    ],
)
def test_hybrid_detection(tmp_path: Path, kinds: list[str] | None, hybrid: bool) -> None:
    family = "hybrid" if hybrid else "llama"
    changes: dict[str, Any] = {} if hybrid else {"layer_types": kinds}
    config = get_config(write_config(tmp_path, family, **changes))
    assert convert(config, get_hf_text_config(config)).is_hybrid is hybrid


@pytest.mark.parametrize("kind", ["mamba", "linear_attention", "gdn"])
def test_older_spelling_of_layer_types(tmp_path: Path, kind: str) -> None:
    config = get_config(write_config(tmp_path))
    config.layers_block_type = ["attention", kind]
    assert convert(config, config).is_hybrid


def test_head_size_falls_back_to_the_quotient(tmp_path: Path) -> None:
    config = get_config(write_config(tmp_path, head_dim=None))
    config.__dict__["head_dim"] = None
    assert convert(config, config).head_size == 16


def test_no_length_is_recorded(tmp_path: Path) -> None:
    config = get_config(write_config(tmp_path))
    config.__dict__["max_position_embeddings"] = None
    assert convert(config, config).max_model_len == 0


SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
    },
}


def test_speculators_checkpoints_name_the_verifier(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS))
    message = "is no model by itself; serve the verifier instead: org/target"
    with pytest.raises(VLLMValidationError, match=message):
        get_config(str(tmp_path))


@pytest.mark.parametrize("described", [None, [], {"verifier": "org/target"}])
def test_speculators_checkpoint_without_a_verifier(described: Any, tmp_path: Path) -> None:
    raw = {"speculators_model_type": "dflash2", "speculators_config": described}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(VLLMValidationError, match="dflash2 .*config names none"):
        get_config(str(tmp_path))


def test_merged_is_deep_and_pure() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(base, {"a": {"b": 5}, "e": 6}) == {"a": {"b": 5, "c": 2}, "d": 3, "e": 6}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_generation_config_of_a_silent_checkpoint(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert get_generation_config(path) == {}
    with pytest.raises(VLLMValidationError, match="generation_config.json") as caught:
        get_generation_config(path, required=True)
    assert caught.value.parameter == "generation_config"
