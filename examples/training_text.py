# SPDX-License-Identifier: Apache-2.0
"""Training samples from text: files cut into pieces of tokens, each token with its loss mask."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from python_library import library_files
from transformers import PreTrainedTokenizerBase

_SUFFIXES = {".jsonl", ".md", ".py", ".txt"}
# A shorter piece has next to nothing to predict.
_MIN_TOKENS = 8


@dataclass(frozen=True)
class Sample:
    """`token_ids` and `loss_mask`, of equal length; a drafter learns where the mask is 1."""

    token_ids: list[int]
    loss_mask: list[int]


def find_files(inputs: list[Path], seed: int = 0) -> list[Path]:
    """The files of `inputs` (directories: their text, Markdown, Python and JSONL files), shuffled.

    Without inputs, the Python standard library. Trainers split off the end of a dataset for
    validation; shuffled files, whose pieces stay together, make that a fair split.
    """
    files: list[Path] = [] if inputs else library_files()
    for path in inputs:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise SystemExit(f"error: no such file or directory: {path}")
    random.Random(seed).shuffle(files)
    return files


def read_samples(
    files: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    limit: int,
    vocab_size: int | None = None,
) -> Iterator[Sample]:
    """At most `limit` samples of at most `seq_length` tokens; reads no more than it has to.

    `vocab_size`: rows with token ids from there on are an error, as are inputs without a sample.
    """
    pieces = (
        piece
        for path in files
        for document in _documents(path, tokenizer, vocab_size)
        for piece in _cut(document, seq_length)
    )
    first = next(pieces, None)
    if first is None:
        raise SystemExit(f"error: the input has no piece of at least {_MIN_TOKENS} tokens")
    yield from islice(chain((first,), pieces), limit)


def _documents(
    path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> Iterator[Sample]:
    """A text file is one document; each line of a JSONL file is one."""
    try:
        if path.suffix == ".jsonl":
            # Texts hold characters that look like ends of lines, but for this one.
            with path.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _from_json(line, f"{path}:{number}", tokenizer, vocab_size)
            return
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        # A few sources declare another encoding; their bytes are still usable text.
        if path.suffix != ".py":
            raise SystemExit(f"error: {path} is not UTF-8 text: {error}") from error
        text = path.read_text(encoding="utf-8", errors="replace")
    yield _from_text(text, tokenizer)


def _from_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    token_ids = tokenizer(text, verbose=False).input_ids
    return Sample(token_ids, [1] * len(token_ids))


def _from_json(
    line: str, where: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> Sample:
    """`{"text": ...}`, or `{"input_ids": [...]}` with an optional `"loss_mask"`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise SystemExit(f"error: {where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not ("text" in row or "input_ids" in row):
        raise SystemExit(
            f'error: {where} has neither "text" nor "input_ids"; '
            "for conversations, run `speculators prepare-data` and export its rows"
        )
    if "text" in row:
        if not isinstance(row["text"], str):
            raise SystemExit(f"error: {where}: text must be a string, not {row['text']!r:.60}")
        return _from_text(row["text"], tokenizer)
    token_ids = row["input_ids"]
    if not _are_counts(token_ids):
        raise SystemExit(f"error: {where}: input_ids must be a list of token ids")
    if vocab_size is not None and (worst := max(token_ids, default=0)) >= vocab_size:
        raise SystemExit(f"error: {where}: token id {worst} in a vocabulary of {vocab_size}")
    loss_mask = row.get("loss_mask", [1] * len(token_ids))
    if not _are_counts(loss_mask) or max(loss_mask, default=0) > 1:
        raise SystemExit(f"error: {where}: loss_mask must be a list of 0 and 1")
    if len(loss_mask) != len(token_ids):
        raise SystemExit(
            f"error: {where} has {len(token_ids)} input_ids, but a loss_mask of {len(loss_mask)}"
        )
    return Sample(token_ids, [int(counts) for counts in loss_mask])


def _are_counts(values: Any) -> bool:
    """Whether these are a list of integers, none of them negative."""
    return isinstance(values, list) and all(
        isinstance(value, int) and value >= 0 for value in values
    )


def _cut(document: Sample, seq_length: int) -> Iterator[Sample]:
    for start in range(0, len(document.token_ids), seq_length):
        piece = slice(start, start + seq_length)
        if len(document.token_ids[piece]) >= _MIN_TOKENS:
            yield Sample(document.token_ids[piece], document.loss_mask[piece])
