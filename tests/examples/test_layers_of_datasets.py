# SPDX-License-Identifier: Apache-2.0
"""A dataset of hidden states has one set of layers: other ones of the same number are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafter_dataset import DrafterDataset, Settings, problem_in
from safetensors.torch import save_file
from training_text import Sample

pytestmark = pytest.mark.extraction


def prepared(path: Path, layers: list[int] | None = None) -> DrafterDataset:
    """A dataset of three samples whose hidden states are missing."""
    dataset = DrafterDataset(path)
    settings = Settings("m", "server", layers, 2, 3, [])
    dataset.prepare(settings, [Sample([10 * n + 1, 10 * n + 2], [1, 1]) for n in range(3)])
    (path / "hidden_states").mkdir()
    return dataset


def stored(path: Path, index: int, layers: list[int] | None) -> Path:
    """What an engine wrote for a sample; None: one that does not say its layers."""
    tokens = torch.tensor([10 * index + 1, 10 * index + 2])
    metadata = None if layers is None else {"layer_ids": json.dumps(layers)}
    save_file({"hidden_states": torch.ones(2, 3, 4), "token_ids": tokens}, path, metadata)
    return path


def test_a_server_that_was_started_again_with_other_layers(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    dataset.adopt(0, stored(tmp_path / "engine", 0, [1, 2, 4]))
    again = DrafterDataset(tmp_path)
    assert [again.is_finished(n) for n in range(3)] == [True, False, False]
    reason = r"layers \[1, 3, 4\], while other samples have those of \[1, 2, 4\]"
    with pytest.raises(SystemExit, match=reason):
        again.adopt(1, stored(tmp_path / "engine", 1, [1, 3, 4]))
    again.adopt(1, stored(tmp_path / "engine", 1, [1, 2, 4]))
    assert again.is_finished(1)


def test_other_layers_than_the_dataset_is_said_to_have(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, [1, 2, 4])
    with pytest.raises(SystemExit, match=r"layers \[1, 3, 4\] instead of \[1, 2, 4\]"):
        dataset.adopt(0, stored(tmp_path / "engine", 0, [1, 3, 4]))
    stored(dataset.file_of(1), 1, [1, 3, 4])
    assert not dataset.is_finished(1)
    found = dict(dataset.problems())
    assert found[1] is not None and "layers [1, 3, 4] instead of [1, 2, 4]" in found[1]
    path = stored(tmp_path / "engine", 2, [1, 2, 4])
    assert problem_in(path, [21, 22], [1, 2, 4]) is None


def test_a_check_finds_other_layers(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    for index, layers in enumerate(([1, 2, 4], [1, 3, 4], [1, 2, 4])):
        stored(dataset.file_of(index), index, layers)
    found = dict(dataset.problems())
    assert found[0] is found[2] is None
    assert found[1] is not None and "layers [1, 3, 4], while" in found[1]


@pytest.mark.parametrize("layers", [None, [1, 2, 4]])
@pytest.mark.parametrize("first", [0, 1])
def test_files_that_do_not_say_their_layers_still_join(
    layers: list[int] | None, first: int, tmp_path: Path
) -> None:
    """Those of earlier versions, and of connectors with an encoding of their own."""
    dataset = prepared(tmp_path, layers)
    for index in range(3):
        said = None if index == first else [1, 2, 4]
        dataset.adopt(index, stored(tmp_path / "engine", index, said))
    assert all(map(dataset.is_finished, range(3)))
    assert {problem for _, problem in DrafterDataset(tmp_path).problems()} == {None}
