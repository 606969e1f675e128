# SPDX-License-Identifier: Apache-2.0
"""Datasets of what a model says itself: prompts cut from text, its greedy continuations, and the
hidden states of both, in one pass of the engine.

A drafter has to predict the model, not the text; and where the tokens are the model's own, what
would be accepted while serving can be read off the dataset (`vllm bench acceptance`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from drafter_dataset import DrafterDataset, Settings
from extraction_engines import extraction_config, wait_until_complete
from python_library import is_held_out, library_root
from training_text import Sample, find_files
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm import LLM, SamplingParams, TokensPrompt


@dataclass(frozen=True)
class Wanted:
    """One dataset: where, how many samples, whether from the held-out files, and whether the
    drafter learns from the prompts, too."""

    path: Path
    samples: int
    held_out: bool
    learn_prompts: bool


@dataclass(frozen=True)
class Speech:
    """`layers`: as of `extract_hidden_states`. A sample is `prompt_tokens` of a text and
    `output_tokens` of the model, less the last one, which never went through it."""

    model: str
    layers: list[int]
    prompt_tokens: int
    output_tokens: int
    inputs: list[Path]
    memory_bytes: int


def make_datasets(speech: Speech, wanted: Sequence[Wanted]) -> None:
    """Write all of `wanted`. Raises SystemExit with an explanation for what cannot be done."""
    tokenizer = AutoTokenizer.from_pretrained(speech.model)
    llm: LLM | None = None
    for one in wanted:
        dataset = DrafterDataset(one.path)
        if dataset.is_prepared:
            raise SystemExit(f"error: there is a dataset at {one.path}; choose another --output")
    try:
        for one in wanted:
            dataset = DrafterDataset(one.path)
            with dataset.writing():
                files = files_of(speech.inputs, one.held_out)
                prompts = list(islice(cut(files, tokenizer, speech.prompt_tokens), one.samples))
                if llm is None:
                    storage = wanted[0].path.parent / ".stored"
                    llm = _engine(speech, storage)
                _fill(dataset, speech, one, prompts, llm)
    finally:
        if llm is not None:
            llm.llm_engine.shutdown()


def files_of(inputs: list[Path], held_out: bool) -> list[Path]:
    """The Python files of `inputs` (default: the standard library) that are held out, or not."""
    library = library_root()
    found = [path for path in find_files(inputs) if path.suffix == ".py"]
    found = [
        path
        for path in found
        if is_held_out(path.relative_to(library if path.is_relative_to(library) else "/"))
        == held_out
    ]
    if not found:
        kind = "held-out" if held_out else "training"
        raise SystemExit(f"error: no {kind} .py file in {inputs}: one in twenty is held out")
    return found


def cut(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[list[int]]:
    """`length` tokens from a random place of each file, again and again."""
    places = random.Random(0)
    token_ids: dict[Path, list[int]] = {}
    while True:
        some = False
        for path in files:
            if path not in token_ids:
                text = path.read_text(encoding="utf-8", errors="replace")
                token_ids[path] = tokenizer(text, verbose=False).input_ids
            room = len(token_ids[path]) - length
            if room >= 0:
                some = True
                start = places.randint(0, room)
                yield token_ids[path][start : start + length]
        if not some:
            raise SystemExit(f"error: no file has {length} tokens; choose a lower --prompt-tokens")


def _engine(speech: Speech, storage: Path) -> LLM:
    return LLM(
        speech.model,
        dtype="float32",
        max_model_len=speech.prompt_tokens + speech.output_tokens,
        max_num_seqs=32,
        kv_cache_memory_bytes=speech.memory_bytes,
        enable_prefix_caching=False,
        **extraction_config(speech.layers, storage),
    )


def _fill(
    dataset: DrafterDataset, speech: Speech, wanted: Wanted, prompts: list[list[int]], llm: LLM
) -> None:
    """Generate, then write the dataset's text part, then give each sample its rows."""
    extra: dict[str, Any] = {"kv_transfer_params": {"include_output_tokens": True}}
    params = SamplingParams(
        max_tokens=speech.output_tokens, temperature=0, ignore_eos=True, extra_args=extra
    )
    kind = "held-out samples" if wanted.held_out else "training samples"
    print(f"{len(prompts)} {kind} of {speech.prompt_tokens} + {speech.output_tokens} tokens")
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params)
    samples, paths = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output.kv_transfer_params:
            raise SystemExit("error: the engine could not store a sample; its log says why")
        paths.append(Path(output.kv_transfer_params["hidden_states_path"]))
        said = list(output.outputs[0].token_ids)[:-1]
        mask = [int(wanted.learn_prompts)] * len(prompt) + [1] * len(said)
        samples.append(Sample(prompt + said, mask))
    settings = Settings(
        model=speech.model,
        dtype="float32",
        layers=speech.layers,
        seq_length=speech.prompt_tokens + speech.output_tokens,
        samples=wanted.samples,
        inputs=[str(path.resolve()) for path in speech.inputs],
    )
    dataset.prepare(settings, samples)
    for index, path in enumerate(paths):
        dataset.adopt(index, wait_until_complete(path))
