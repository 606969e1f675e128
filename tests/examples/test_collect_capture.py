# SPDX-License-Identifier: Apache-2.0
"""What a server captured becomes a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import collect_capture
import pytest
import torch
from drafter_dataset import DrafterDataset
from safetensors.torch import save_file


def capture(path: Path, lengths: list[tuple[int, int]]) -> None:
    """As a server leaves it: samples of so many tokens, the first ones the prompt's."""
    (path / "hidden_states").mkdir(parents=True, exist_ok=True)
    said = {"model": "m", "dtype": "float32", "layers": [1, 4]}
    (path / "capture.json").write_text(json.dumps(said))
    for index, (count, _) in enumerate(lengths):
        ids = torch.arange(count) + 10 * index
        rows = torch.zeros(count, 2, 4)
        file = path / "hidden_states" / f"hs_{index}.safetensors"
        save_file({"hidden_states": rows, "token_ids": ids}, file)
    lines = [json.dumps({"num_prompt": prompt}) + "\n" for _, prompt in lengths]
    (path / "samples.jsonl").write_text("".join(lines))


def test_captures_become_a_dataset_and_grow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture(tmp_path, [(6, 2), (5, 4)])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"num_')  # the server is writing
    assert collect_capture.main([str(tmp_path)]) == 0
    assert f"{tmp_path}: 2 samples" in capsys.readouterr().out
    dataset = DrafterDataset(tmp_path)
    assert [problem for _, problem in dataset.problems()] == [None, None]
    assert dataset.token_ids(1) == [10, 11, 12, 13, 14]
    assert (dataset.loss_mask(0), dataset.loss_mask(1)) == ([0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1])
    assert dataset.layers == [1, 4]
    counts = torch.load(tmp_path / "token_freq.pt", weights_only=True)
    assert counts == {2: 1, 3: 1, 4: 1, 5: 1, 14: 1}
    capture(tmp_path, [(6, 2), (5, 4), (8, 3)])
    [arrow] = tmp_path.glob("*.arrow")
    with arrow.open("rb") as read:  # a trainer maps it
        before = read.read()
        assert collect_capture.collect(tmp_path) == 3
        read.seek(0)
        assert read.read() == before
    assert len(DrafterDataset(tmp_path)) == 3


def test_nothing_to_collect(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no capture.json"):
        collect_capture.collect(tmp_path)
    capture(tmp_path, [])
    with pytest.raises(SystemExit, match="nothing was captured"):
        collect_capture.collect(tmp_path)
    capture(tmp_path, [(6, 2)])
    (tmp_path / "hidden_states" / "hs_0.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"error: .*hs_0.safetensors"):
        collect_capture.main([str(tmp_path)])
