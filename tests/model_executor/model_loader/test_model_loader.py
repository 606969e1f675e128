# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: whole, sharded, damaged, converted; and dummy weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_executor.harness import get_model, make_config
from tests.tiny_models import tiny_model
from vllm import decisions
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base import initialize_dummy_weights
from vllm.model_executor.model_loader.weight_utils import (
    safetensors_files,
    safetensors_weights_iterator,
)
from vllm.model_executor.models.weights import WeightsError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A private copy that a test may damage."""
    target = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3_5"), target)
    return target


def parameters(path: Path, **fields: str) -> dict[str, Tensor]:
    model = get_model(make_config(path, **fields))
    return {name: param.cpu() for name, param in model.named_parameters()}


def shard(path: Path, count: int = 3) -> dict[str, str]:
    """Split `model.safetensors` into files with an index, as Hugging Face does."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[i::count])
        save_file(part, path / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_model_is_ready_for_inference(checkpoint: Path) -> None:
    model = get_model(make_config(checkpoint))
    assert not model.training
    assert all(not p.requires_grad and not p.isnan().any() for p in model.parameters())


def test_sharded_files_load_the_same(checkpoint: Path) -> None:
    expected = parameters(checkpoint)
    shard(checkpoint)
    assert_equal(parameters(checkpoint), expected)
    assert_equal(parameters(checkpoint, load_format="safetensors"), expected)


def test_files_outside_the_index_are_not_read(checkpoint: Path) -> None:
    expected = parameters(checkpoint)
    shard(checkpoint)
    save_file({"junk": torch.zeros(1)}, checkpoint / "consolidated.safetensors")
    assert_equal(parameters(checkpoint), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints_convert(checkpoint: Path, stored: torch.dtype) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = parameters(checkpoint)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    name = "model.norm.weight"
    assert torch.equal(loaded[name], tensors[name].float())


def test_truncated_file_is_named(checkpoint: Path) -> None:
    shard(checkpoint)
    victim = sorted(checkpoint.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{victim.name} is truncated or corrupt"):
        parameters(checkpoint)


def test_garbage_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="model.safetensors is truncated or corrupt"):
        parameters(checkpoint)


def test_index_that_disagrees_with_its_files(checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    first = sorted(checkpoint.glob("*.safetensors"))[0]
    tensors = load_file(first)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, first)
    with pytest.raises(ValueError, match=f"{first.name} lacks 1 indexed tensors: .*{lost}"):
        parameters(checkpoint)
    (checkpoint / weight_map[lost]).unlink()
    with pytest.raises(ValueError, match=f"names absent files: {first.name}"):
        parameters(checkpoint)


def test_a_whole_checkpoint_beside_an_index(tmp_path: Path) -> None:
    """transformers leaves the index of files that it replaces by one; it reads that one."""
    one, other = (tmp_path / f"{name}.safetensors" for name in ("model", "model-00001-of-00001"))
    for path in (one, other):
        save_file({path.name: torch.zeros(1)}, path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {other.name: other.name}}))
    assert safetensors_files(tmp_path) == {one: None}
    assert safetensors_files(tmp_path, ["model.safetensors"]) == {other: [other.name]}
    other.unlink()
    assert safetensors_files(tmp_path) == {one: None}
    index.write_text(json.dumps({"weight_map": {one.name: one.name}}))
    assert safetensors_files(tmp_path) == {one: [one.name]}


def test_the_config_may_name_the_weights(checkpoint: Path) -> None:
    """As transformers has it, whatever else is there: a file, or an index of some."""
    expected = parameters(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())

    def name(file: object) -> None:
        fields = {**config, "transformers_weights": file}
        (checkpoint / "config.json").write_text(json.dumps(fields))

    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").rename(checkpoint / "own.safetensors.index.json")
    save_file({"junk": torch.zeros(1)}, checkpoint / "model.safetensors")
    name("own.safetensors.index.json")
    assert_equal(parameters(checkpoint), expected)
    for wrong in ("../model.safetensors", "pytorch_model.bin", "a/b.safetensors", 3):
        name(wrong)
        with pytest.raises(ValueError, match=r"transformers_weights .* is not supported; it may"):
            parameters(checkpoint)
    name("absent.safetensors")
    with pytest.raises(ValueError, match="absent.safetensors is absent, which transformers_w"):
        parameters(checkpoint)
    name("whole.safetensors")
    shutil.copy(tiny_model("qwen3_5") / "model.safetensors", checkpoint / "whole.safetensors")
    assert_equal(parameters(checkpoint), expected)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'],
)
def test_unreadable_index(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    with pytest.raises(ValueError, match="not a safetensors index"):
        parameters(checkpoint)


def test_checkpoint_that_does_not_fit(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.0.linear_attn.in_proj_z.weight"))
    other = next(n for n in tensors if n.endswith("layers.1.mlp.up_proj.weight"))
    del tensors[name]
    tensors[other] = tensors[other][:-1]
    save_file(tensors, file)
    with pytest.raises(WeightsError) as caught:
        parameters(checkpoint)
    assert [p.split(": ")[0] for p in caught.value.problems] == ["mis-shaped", "missing"]
    assert "in_proj_z.weight" in caught.value.problems[1]


def test_directory_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no \*.safetensors file \(found only pytorch_model.bin"):
        safetensors_files(tmp_path)


def test_ignored_patterns(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({name[0]: torch.zeros(1)}, tmp_path / name)
    plan = safetensors_files(tmp_path, ["b.*"])
    assert [name for name, _ in safetensors_weights_iterator(plan, use_tqdm=False)] == ["a"]


def test_files_without_an_index(tmp_path: Path) -> None:
    """Of two files with one name the later was used; `model.safetensors` is a checkpoint alone."""
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"same": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"both a.safetensors and b.safetensors have same; leave"):
        safetensors_files(tmp_path)
    save_file({"same": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert safetensors_files(tmp_path) == {tmp_path / "model.safetensors": None}


def test_an_output_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("llama"), tmp_path / "tied")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(WeightsError, match="lm_head.weight is not the embedding"):
        parameters(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    assert "lm_head.weight" not in parameters(path)


@pytest.mark.parametrize("family", ["qwen3_5_tied", "gemma3"])
def test_a_tied_model_of_a_head_alone(family: str, tmp_path: Path) -> None:
    """transformers ties the embedding to the head then."""
    path = shutil.copytree(tiny_model(family), tmp_path / "head")
    expected = parameters(path)
    tensors = load_file(path / "model.safetensors")
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = tensors.pop(embedding)
    save_file(tensors, path / "model.safetensors")
    decisions.clear()
    assert_equal(parameters(path), expected)
    records = {each.what: each.chosen for each in decisions.decisions()}
    assert records["embedding"] == "lm_head.weight"
    assert not [what for what in records if "lm_head" in what]


def test_model_that_leaves_parameters_unset(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    monkeypatch.setattr(Qwen3_5ForCausalLM, "load_weights", lambda self, weights: set())
    with pytest.raises(WeightsError, match=r"not loaded: lm_head.weight"):
        parameters(checkpoint)


def test_dummy_weights_need_no_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    first = parameters(checkpoint, load_format="dummy")
    assert_equal(parameters(checkpoint, load_format="dummy"), first)


def test_dummy_weights_are_sane(checkpoint: Path) -> None:
    loaded = parameters(checkpoint, load_format="dummy")
    for name, tensor in loaded.items():
        low, high = float(tensor.min()), float(tensor.max())
        if name.endswith(("A_log", "dt_bias")):
            assert -3 <= low < high <= -1
        elif name.endswith("linear_attn.norm.weight"):
            assert 0.9 <= low < high <= 1.1
        elif name.endswith("norm.weight"):
            assert -0.1 <= low < 0 < high <= 0.1
        elif name.endswith("proj.weight"):
            assert abs(float(tensor.std()) * tensor.shape[1] ** 0.5 - 1) < 0.1
        if tensor.dim() == 2:
            assert len(tensor.unique(dim=0)) == len(tensor), f"{name} repeats rows"
    assert not torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])


def test_dummy_seed() -> None:
    def fill(seed: int) -> Tensor:
        layer = torch.nn.Linear(2000, 1100)
        initialize_dummy_weights(layer, seed)
        return layer.weight.detach()

    assert torch.equal(fill(3), fill(3))
    assert not torch.equal(fill(3), fill(4))
    assert len(fill(3).unique(dim=0)) == 1100, "larger than the pool, still no equal rows"


def test_unknown_load_format() -> None:
    config = LoadConfig()
    object.__setattr__(config, "load_format", "gguf")
    with pytest.raises(ValueError, match="'gguf' is not supported; supported: .*safetensors"):
        get_model_loader(config)
