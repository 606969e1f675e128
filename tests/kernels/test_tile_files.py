# SPDX-License-Identifier: Apache-2.0
"""Launch parameters as files: which one a GPU gets, and what a bad one says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm import decisions
from vllm.kernels.triton import configs
from vllm.kernels.triton.configs import choose, device_configs, pick, shipped, use_configs
from vllm.kernels.triton.tile_files import (
    SHIPPED,
    Configs,
    Tile,
    TileFile,
    TileFileError,
    file_name,
    read_tile_file,
    write_tile_file,
)

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    decisions.clear()


def chosen_file() -> tuple[str, str]:
    """Name and reason of the file that was decided on."""
    [one] = [d for d in decisions.decisions() if d.what == "launch parameters of kernels"]
    return one.chosen, one.why


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_are_complete_and_written_as_the_tuner_writes(
    path: Path, tmp_path: Path
) -> None:
    found = read_tile_file(path)
    assert path.name == file_name(found.gpu)
    write_tile_file(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_text() == path.read_text()
    for field in dataclasses.fields(Configs):
        value = getattr(found.configs, field.name)
        for tile in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tile, Tile):
                assert tile.num_warps in (1, 2, 4, 8, 16), f"{path.name}: {field.name}"


def test_every_head_dimension_up_to_256_has_a_tile() -> None:
    for gpu in (None, H200):
        for field in dataclasses.fields(Configs):
            value = getattr(shipped(gpu), field.name)
            if isinstance(value, dict) and not field.name.startswith("moe_"):
                assert pick(value, 256), f"{gpu}: {field.name}"


def test_a_gpu_is_known_by_name_then_by_generation_then_as_any() -> None:
    assert choose(H200, (9, 0)) == shipped(H200)
    assert chosen_file() == ("NVIDIA_H200.json", f"measured on this GPU ({H200})")
    assert choose("NVIDIA H100 PCIe", (9, 0)) == shipped(H200)
    assert "another GPU of this generation" in chosen_file()[1]
    assert choose("NVIDIA L4", (8, 9)) == shipped(None) != shipped(H200)
    assert chosen_file()[0] == "small.json" and "not measured" in chosen_file()[1]


def own_file(folder: Path, gpu: str, **changes: Any) -> TileFile:
    made = TileFile(gpu, (9, 0), dataclasses.replace(shipped(None), **changes))
    write_tile_file(folder / file_name(gpu), made)
    return made


def test_the_users_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    choose(H200, (9, 0))
    assert chosen_file()[0] == "NVIDIA_H200.json" and "has no NVIDIA_H200.json" in chosen_file()[1]
    made = own_file(tmp_path, H200, gdn_decode=Tile(8, 256, 2, 1))
    assert choose(H200, (9, 0)) == made.configs
    assert "from VLLM_TUNED_CONFIG_FOLDER" in chosen_file()[1]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda content: content.pop("tiles"), "not a file of launch parameters"),
        (lambda content: content["tiles"].pop("conv1d"), "missing key 'conv1d'"),
        (lambda content: content["tiles"].update(conv2d=1), "unknown key 'conv2d'"),
        (lambda content: content["tiles"]["conv1d"].pop("rows"), "'conv1d' is malformed"),
        (lambda content: content["tiles"]["conv1d"].update(rows=0), "expected a positive number"),
        (lambda content: content["tiles"]["conv1d"].update(rows="8"), "expected a positive number"),
        (lambda content: content["tiles"].update(attention_decode=3), "'attention_decode' is mal"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, break_it: Any, words: str) -> None:
    content = json.loads((SHIPPED / file_name(H200)).read_text())
    break_it(content)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TileFileError) as caught:
        read_tile_file(path)
    assert str(path) in str(caught.value) and words in str(caught.value)


def test_parameters_in_use_can_be_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_in_use", {})
    cpu = torch.device("cpu")
    assert device_configs(cpu) == shipped(None)
    use_configs(cpu, shipped(H200))
    assert device_configs(cpu) == shipped(H200)
