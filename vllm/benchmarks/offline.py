# SPDX-License-Identifier: Apache-2.0
"""What the offline benchmarks share: an engine from the flags, and their result file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.engine.unsupported_flags import (
    UNSUPPORTED_BENCH_FLAGS,
    add_unsupported,
    check_unsupported,
)
from vllm.entrypoints.cli.serve import add_model_argument, choose_model
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.inputs import TokensPrompt
    from vllm.utils.argparse_utils import FlexibleArgumentParser

#: token ids of prompts stay below this, clear of the special tokens at a vocabulary's end
_MAX_TOKEN_ID = 10_000


def add_engine_args(parser: FlexibleArgumentParser) -> None:
    """Declare the model, the engine's flags, and those of other releases' benchmarks."""
    from vllm.engine.arg_utils import EngineArgs

    add_model_argument(parser)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=None)
    add_unsupported(parser, "Unsupported in benchmarks", UNSUPPORTED_BENCH_FLAGS)


def make_llm(namespace: argparse.Namespace) -> LLM:
    """An engine with the engine flags of the command line."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    check_unsupported(vars(namespace), UNSUPPORTED_BENCH_FLAGS)
    model = choose_model(namespace.model_tag, namespace.model)
    given = argparse.Namespace(**{**vars(namespace), "model": model})
    return LLM.from_engine_args(EngineArgs.from_cli_args(given))


def check_length(engine: LLM | VllmConfig, input_len: int, output_len: int) -> None:
    """Raise `VLLMValidationError` when a request would not fit the model's context."""
    limit = engine.model_config.max_model_len
    if input_len + output_len > limit:
        raise VLLMValidationError(
            f"{input_len} input and {output_len} output tokens exceed --max-model-len {limit}"
        )


def random_prompts(llm: LLM, count: int, length: int, seed: int | None) -> list[TokensPrompt]:
    """`count` prompts of `length` random tokens."""
    highest = min(_MAX_TOKEN_ID, llm.model_config.get_vocab_size())
    ids = np.random.default_rng(seed).integers(0, highest, (count, length))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def save_json(path: str | None, result: dict[str, Any]) -> None:
    """Write `--output-json`, if it was given."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
