# SPDX-License-Identifier: Apache-2.0
"""Requests of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.entrypoints.fake_engine import byte_tokenizer
from vllm.benchmarks.datasets import DatasetArgs, RandomPrompts, load_samples
from vllm.exceptions import VLLMValidationError

#: a tokenizer with merges
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3_5-code"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def dataset(**fields: Any) -> DatasetArgs:
    return DatasetArgs(**{"num_prompts": 20, **fields})


def test_random_prompts_have_the_length_that_was_asked_for(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    args = dataset(random_input_len=50, random_output_len=7)
    samples = load_samples(args, tokenizer, seed=3)
    assert [len(tokenizer.encode(s.prompt)) for s in samples] == [50] * 20
    assert {(s.prompt_len, s.output_len) for s in samples} == {(50, 7)}
    assert len({s.prompt for s in samples}) == 20
    assert samples == load_samples(args, tokenizer, seed=3)
    assert samples != load_samples(args, tokenizer, seed=4)


def test_merges_do_not_change_the_length() -> None:
    merging = AutoTokenizer.from_pretrained(EXAMPLE)
    samples = load_samples(dataset(random_input_len=64), merging, seed=0)
    assert [len(merging.encode(s.prompt)) for s in samples] == [64] * 20
    # Joined at random, tokens are not how the text is split: lengths need the correction.
    ids = RandomPrompts(merging, 0).tokens(1000)
    assert len(merging.encode(merging.decode(ids))) != 1000


def test_spread_prefix_and_short_names(tokenizer: PreTrainedTokenizerFast) -> None:
    args = dataset(
        num_prompts=400, input_len=40, output_len=20, random_range_ratio=0.25, random_prefix_len=8
    )
    samples = load_samples(args, tokenizer, seed=0)
    prompt_lens = {s.prompt_len for s in samples}
    output_lens = {s.output_len for s in samples}
    assert prompt_lens == set(range(8 + 30, 8 + 51)) and output_lens == set(range(15, 26))
    assert len({s.prompt[:8] for s in samples}) == 1 < len({s.prompt[:9] for s in samples})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"num_prompts": 0}, "--num-prompts"),
        ({"dataset_name": "custom"}, "needs --dataset-path"),
        ({"dataset_path": "x"}, "random needs no file"),
        ({"dataset_name": "custom", "dataset_path": "/no/file"}, "/no/file: no such file"),
        ({"dataset_name": "sonnet"}, "dataset_name"),
    ],
)
def test_flags_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        dataset(**fields)


def write(path: Path, *entries: Any) -> str:
    text = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_custom_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    # Texts may hold what Python takes for the end of a line.
    path = write(tmp_path / "p.jsonl", {"prompt": "a\x85"}, {"prompt": "é", "output_tokens": 9})
    args = dataset(dataset_name="custom", dataset_path=path, num_prompts=3, disable_shuffle=True)
    shown = [(s.prompt, s.prompt_len, s.output_len) for s in load_samples(args, None, 0)]
    assert shown == [("a\x85", None, 256), ("é", None, 9), ("a\x85", None, 256)]
    args = dataset(dataset_name="custom", dataset_path=path, num_prompts=2, output_len=5)
    counted = {(s.prompt_len, s.output_len) for s in load_samples(args, tokenizer, 0)}
    assert counted == {(3, 5), (2, 5)}


def test_entries_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": str(i)} for i in range(20)))
    args = dataset(dataset_name="custom", dataset_path=path)
    first, again, other = ([s.prompt for s in load_samples(args, None, i)] for i in (1, 1, 2))
    assert first == again != other and set(first) == {str(i) for i in range(20)}


def test_sharegpt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def talk(prompt: str, answer: str) -> dict[str, Any]:
        return {"conversations": [{"value": prompt}, {"value": answer}, {"value": "more"}]}

    path = tmp_path / "s.json"
    dropped = [talk("abc", "long enough"), talk("long enough", "abc"), talk("x" * 1025, "answer")]
    dropped += [talk("prompt", "x" * 2043), {"conversations": [{"value": "alone"}]}]
    path.write_text(json.dumps([*dropped, talk("question", "an answer")]))
    args = dataset(dataset_name="sharegpt", dataset_path=str(path), num_prompts=1)
    [sample] = load_samples(args, tokenizer, 0)
    assert (sample.prompt, sample.prompt_len, sample.output_len) == ("question", 8, 9)
    with pytest.raises(VLLMValidationError, match="needs a --tokenizer"):
        load_samples(args, None, 0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt": 1}', ":2: no text under `prompt`"),
        ("custom", '{"prompt": "a"}\n\n{', ":3: not valid JSON"),
        ("custom", "", "no usable entry"),
        ("sharegpt", "{}", "expected a JSON list"),
        ("sharegpt", "[", "not valid JSON"),
        ("custom", None, "Is a directory"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, text: str | None, words: str
) -> None:
    path = tmp_path / "file"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    args = dataset(dataset_name=name, dataset_path=str(path))
    with pytest.raises(VLLMValidationError, match=words):
        load_samples(args, tokenizer, 0)
