# SPDX-License-Identifier: Apache-2.0
"""Decoders with token mixers of a test's own: a checkpoint, and what holds when it is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draft_scenarios import Run, compare, engine
from parity_checks import MakeEngine, assert_equals, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor
from transformers import PreTrainedModel


def make_checkpoint(
    directory: Path, architecture: str, mixers: Mapping[int, Mapping[str, Tensor]]
) -> Path:
    """A tiny Qwen3 of `architecture`, whose layers have these mixers' tensors for attention."""
    path = make_tiny("qwen3", directory)
    tensors = load_file(path / "model.safetensors")
    for i, mixer in mixers.items():
        prefix = f"model.layers.{i}.self_attn."
        tensors = {k: v for k, v in tensors.items() if not k.startswith(prefix)}
        tensors |= {prefix + name: value.contiguous() for name, value in mixer.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return path


def expect_equal_with_and_without_drafts(
    scenario: Callable[[Run], None],
    checkpoint: Path,
    reference: PreTrainedModel,
    make_engine: MakeEngine,
    methods: tuple[str, ...] = ("replay", "ngram"),
) -> None:
    """Plain outputs are the reference's, those with drafts are the plain ones."""
    settings: dict[str, Any] = {"model": str(checkpoint), "enable_prefix_caching": True}
    plain = Run(engine(make_engine, 0, **settings))
    scenario(plain)
    for output in plain.outputs:
        assert_equals(output, reference)
    for method in methods:
        told = plain.tokens() if method == "replay" else None
        drafted = Run(engine(make_engine, 3, method=method, **settings), told)
        scenario(drafted)
        compare(drafted.outputs, plain.outputs)


def expect_own_drafts_accepted(
    checkpoint: Path,
    reference: PreTrainedModel,
    make_engine: MakeEngine,
    prompt_len: int,
    family: str = "qwen3_5",
) -> None:
    """All of them, with the model as its own draft model."""
    speculation = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    llm = make_engine(family, model=str(checkpoint), speculative_config=speculation)
    run = Run(llm)
    (output,) = run.generate(prompts((prompt_len,)), [1 + 4 * 6])
    assert_equals(output, reference)
    assert run.drafts() == (3 * 6, 0)
