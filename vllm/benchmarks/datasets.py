# SPDX-License-Identifier: Apache-2.0
"""The requests of a benchmark: random tokens, ShareGPT conversations, or a file of prompts."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vllm.benchmarks.outcome import Sample
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.options import FlagKind, config, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = init_logger(__name__)

#: ShareGPT entries outside these lengths, in tokens, are left out, as is customary
_MIN_LEN, _MAX_PROMPT_LEN, _MAX_TOTAL_LEN = 4, 1024, 2048
_CUSTOM_OUTPUT_LEN = 256
#: distinct tokens that prompts are drawn from
_POOL = 8192
#: rounds of encoding and cutting before a prompt is taken as it is
_ROUNDS = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@config
class DatasetArgs:
    """Which requests are sent."""

    dataset_name: Literal["random", "sharegpt", "custom"] = option(
        default="random",
        help="random: random tokens; sharegpt: first turns of a ShareGPT JSON file; custom: a "
        "JSONL file of objects with `prompt` and, if wanted, `output_tokens`.",
    )
    dataset_path: str | None = option(default=None, help="File of a sharegpt or custom dataset.")
    num_prompts: PositiveInt = option(
        default=1000, kind=FlagKind.HUMAN_INT, help="Requests to send."
    )
    input_len: int | None = option(
        default=None, kind=FlagKind.HUMAN_INT, help="Same as --random-input-len."
    )
    output_len: int | None = option(
        default=None,
        kind=FlagKind.HUMAN_INT,
        help="Tokens to ask for; default: what the dataset says, 256 where it says nothing.",
    )
    random_input_len: int = option(
        default=1024, kind=FlagKind.HUMAN_INT, help="Tokens per random prompt, without the prefix."
    )
    random_output_len: int = option(
        default=128, kind=FlagKind.HUMAN_INT, help="Tokens to ask for per random prompt."
    )
    random_range_ratio: Annotated[float, Field(ge=0, lt=1)] = option(
        default=0.0,
        help="Spread r in [0, 1) of random lengths: uniform in [length (1-r), length (1+r)].",
    )
    random_prefix_len: int = option(
        default=0,
        aliases=("--prefix-len",),
        kind=FlagKind.HUMAN_INT,
        help="Tokens that all random prompts begin with.",
    )
    disable_shuffle: bool = option(default=False, help="Take the entries of a file in order.")

    def __post_init__(self) -> None:
        if self.dataset_name != "random" and self.dataset_path is None:
            raise VLLMValidationError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise VLLMValidationError(
                "--dataset-path needs --dataset-name sharegpt or custom; random needs no file"
            )
        if self.dataset_path is not None and not Path(self.dataset_path).exists():
            raise VLLMValidationError(f"--dataset-path {self.dataset_path}: no such file")


def load_samples(
    args: DatasetArgs, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> list[Sample]:
    """`args.num_prompts` samples, the same ones for the same seed.

    Raises `VLLMValidationError` when a file cannot be used or a tokenizer is needed and missing.
    """
    if args.dataset_name == "custom":
        return _fill(args, list(_custom(args, tokenizer)), seed)
    if tokenizer is None:
        raise VLLMValidationError(f"--dataset-name {args.dataset_name} needs a --tokenizer")
    if args.dataset_name == "sharegpt":
        return _fill(args, list(_sharegpt(args, tokenizer)), seed)
    return list(_random(args, tokenizer, seed))


def _random(args: DatasetArgs, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Sample]:
    prompts = RandomPrompts(tokenizer, seed)
    lengths = random.Random(seed)
    prefix = prompts.tokens(args.random_prefix_len)
    mean_in = args.random_input_len if args.input_len is None else args.input_len
    mean_out = args.random_output_len if args.output_len is None else args.output_len

    def spread(mean: int, least: int) -> int:
        low = int(mean * (1 - args.random_range_ratio))
        high = round(mean * (1 + args.random_range_ratio))
        return max(least, lengths.randint(low, max(low, high)))

    for _ in range(args.num_prompts):
        # A prompt must have a token; with a prefix its own part may be empty.
        own = spread(mean_in, 0 if prefix else 1)
        text, count = prompts.prompt(prefix, own)
        yield Sample(text, count, spread(mean_out, 1))


def _sharegpt(args: DatasetArgs, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
    for entry in _read_json(args.dataset_path):
        turns = entry.get("conversations", entry.get("conversation", ()))
        if len(turns) < 2:
            continue
        prompt, answer = turns[0]["value"], turns[1]["value"]
        prompt_len = len(tokenizer.encode(prompt))
        output_len = args.output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        if min(prompt_len, output_len if args.output_len is None else _MIN_LEN) < _MIN_LEN:
            continue
        if prompt_len > _MAX_PROMPT_LEN or prompt_len + output_len > _MAX_TOTAL_LEN:
            continue
        yield Sample(prompt, prompt_len, output_len)


def _custom(args: DatasetArgs, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Sample]:
    for number, entry in _read_jsonl(args.dataset_path):
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str):
            raise VLLMValidationError(f"{args.dataset_path}:{number}: no text under `prompt`")
        asked = args.output_len or entry.get("output_tokens") or _CUSTOM_OUTPUT_LEN
        yield Sample(prompt, len(tokenizer.encode(prompt)) if tokenizer else None, int(asked))


def _fill(args: DatasetArgs, samples: list[Sample], seed: int) -> list[Sample]:
    """Shuffle, and repeat a short dataset until there are enough."""
    if not samples:
        raise VLLMValidationError(f"{args.dataset_path} has no usable entry")
    if len(samples) < args.num_prompts:
        logger.warning(
            "%s has %d usable entries; they are repeated to %d requests",
            args.dataset_path,
            len(samples),
            args.num_prompts,
        )
    if not args.disable_shuffle:
        random.Random(seed).shuffle(samples)
    return list(itertools.islice(itertools.cycle(samples), args.num_prompts))


def _read_json(path: str | None) -> list[dict[str, Any]]:
    content = _parse(path, _read(path))
    if not isinstance(content, list):
        raise VLLMValidationError(f"{path}: expected a JSON list of conversations")
    return content


def _read_jsonl(path: str | None) -> Iterator[tuple[int, Any]]:
    # Not `splitlines`: prompts hold characters that it takes for ends of lines.
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            yield number, _parse(f"{path}:{number}", line)


def _read(path: str | None) -> str:
    assert path is not None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise VLLMValidationError(f"--dataset-path {path}: {error.strerror}") from None


def _parse(where: str | None, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise VLLMValidationError(f"{where}: not valid JSON: {error}") from None


class RandomPrompts:
    """Draws tokens that are text on their own, so that a prompt can be cut between any two."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._num_special = int(tokenizer.num_special_tokens_to_add())
        self._pool = self._make_pool()

    def _make_pool(self) -> list[int]:
        special = set(self._tokenizer.all_special_ids)
        ids = [i for i in range(len(self._tokenizer)) if i not in special]
        self._random.shuffle(ids)
        pool = []
        for token in ids:
            text = self._text([token])
            if text.strip() and _REPLACEMENT not in text:
                pool.append(token)
                if len(pool) == _POOL:
                    break
        return pool

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def tokens(self, count: int) -> list[int]:
        """`count` random token ids."""
        return self._random.choices(self._pool, k=count)

    def prompt(self, prefix: list[int], count: int) -> tuple[str, int]:
        """Text of `prefix` and `count` random tokens, and how many tokens it is to a server.

        That is `len(prefix) + count`, special tokens of the tokenizer included; where merges keep a
        text from reaching this, the true number is returned.
        """
        wanted = max(1, len(prefix) + count - self._num_special)
        ids = (prefix + self.tokens(count))[:wanted]
        for _ in range(_ROUNDS):
            text = self._text(ids)
            encoded = list(self._tokenizer.encode(text, add_special_tokens=False))
            if len(encoded) == wanted:
                break
            ids = encoded[:wanted] + self.tokens(wanted - len(encoded))
        return text, len(encoded) + self._num_special
