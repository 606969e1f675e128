# SPDX-License-Identifier: Apache-2.0
"""From files to samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_process import TRAINED
from python_library import is_held_out, library_files, library_root
from training_text import find_files, read_samples
from transformers import AutoTokenizer

TOKENIZER = AutoTokenizer.from_pretrained(TRAINED)


def test_pieces_join_to_the_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {n}\n" for n in range(200)))
    samples = list(read_samples([file], TOKENIZER, seq_length=64, limit=1000))
    token_ids = [token for sample in samples for token in sample.token_ids]
    whole = TOKENIZER(file.read_text()).input_ids
    assert token_ids == whole[: len(token_ids)]
    assert len(whole) - len(token_ids) < 8, "only a tiny rest may be dropped"
    assert {len(sample.token_ids) for sample in samples[:-1]} == {64}
    assert all(sample.loss_mask == [1] * len(sample.token_ids) for sample in samples)


def test_limit_and_order_are_the_same_every_time() -> None:
    files = find_files([])
    assert files == find_files([]) != sorted(files)
    first = list(read_samples(files, TOKENIZER, 128, limit=10))
    assert first == list(read_samples(files, TOKENIZER, 128, limit=20))[:10]
    assert len(first) == 10


def test_jsonl_keeps_masks(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"input_ids": list(range(20)), "loss_mask": [0] * 12 + [1] * 8}
    # A line of JSONL ends at a newline alone: these are characters of a text.
    words = "x = 1\n" * 5 + "\u2028\x85"
    lines = (json.dumps(row), "", json.dumps({"text": words}, ensure_ascii=False))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    masked, text = read_samples([file], TOKENIZER, seq_length=100, limit=9)
    assert (masked.token_ids, masked.loss_mask) == (row["input_ids"], row["loss_mask"])
    assert text.token_ids == TOKENIZER(words).input_ids
    [head, tail] = read_samples([file], TOKENIZER, seq_length=10, limit=2)
    assert (head.loss_mask, tail.loss_mask) == ([0] * 10, [0] * 2 + [1] * 8)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "rows.jsonl:1 is not JSON"),
        ('{"conversations": []}', 'neither "text" nor "input_ids"'),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "2 input_ids, but a loss_mask of 1"),
        ('{"text": ""}', "no piece of at least 8 tokens"),
        ('{"text": null}', "rows.jsonl:1: text must be a string"),
        ('{"input_ids": [1, "2"]}', "rows.jsonl:1: input_ids must be a list of token ids"),
        ('{"input_ids": [1, 300, 2]}', "rows.jsonl:1: token id 300 in a vocabulary of 256"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "rows.jsonl:1: loss_mask must be a list of"),
    ],
)
def test_bad_rows(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    with pytest.raises(SystemExit, match=reason):
        list(read_samples([file], TOKENIZER, 64, 5, vocab_size=256))


def test_inputs_are_files_and_directories(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.md", "sub/c.png", "d.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff\xfe")
    found = find_files([tmp_path / "sub", tmp_path / "a.py"])
    assert {path.name for path in found} == {"a.py", "b.md"}
    with pytest.raises(SystemExit, match="b.md is not UTF-8"):
        list(read_samples([tmp_path / "sub" / "b.md"], TOKENIZER, 64, 5))
    with pytest.raises(SystemExit, match="no such file or directory"):
        find_files([tmp_path / "missing"])


def test_held_out_split_does_not_move() -> None:
    """The split the demo checkpoint was trained with."""
    held_out = {p for p in library_files() if is_held_out(p.relative_to(library_root()))}
    names = {str(p.relative_to(library_root())) for p in held_out}
    assert {"ast.py", "json/encoder.py"} <= names and "argparse.py" not in names
    assert 0.02 < len(held_out) / len(library_files()) < 0.08
    assert not [path for path in held_out if {"test", "tests"} & set(path.parts)]
