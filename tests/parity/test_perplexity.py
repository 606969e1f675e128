# SPDX-License-Identifier: Apache-2.0
"""The trained checkpoint predicts held-out text as well here as under transformers.

The text is the part of the Python standard library that the checkpoint was not trained on.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from parity_checks import MakeEngine
from tiny_models import hf_reference_logits
from transformers import AutoTokenizer

from examples.python_library import is_held_out, library_files, library_root
from tests.nightly import nightly
from vllm import LLM, SamplingParams, TokensPrompt

pytestmark = [pytest.mark.slow, pytest.mark.parity]

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
#: tokens of the windows; lengths on both sides of block, chunk and budget borders
WINDOWS = (512, 511, 64, 65, 500, 257, 512, 333, 63, 128, 512, 400)
#: largest relative difference of the perplexities
TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.01}


@cache
def held_out_windows() -> list[list[int]]:
    """Consecutive pieces of held-out files, one window per file, the largest files first."""
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    root = library_root()
    files = [path for path in library_files() if is_held_out(path.relative_to(root))]
    files.sort(key=lambda path: (-path.stat().st_size, path))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files[: len(WINDOWS)]]
    return [
        tokenizer(text, verbose=False).input_ids[:length]
        for text, length in zip(texts, WINDOWS, strict=True)
    ]


@cache
def reference_logprobs(dtype: torch.dtype) -> torch.Tensor:
    """transformers' log-probability of every token but each window's first, `[tokens]`."""
    scores = []
    for window in held_out_windows():
        logits = hf_reference_logits(TRAINED, window, dtype)[:-1].float()
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    return torch.cat(scores)


def engine_logprobs(llm: LLM) -> torch.Tensor:
    """The same from the engine's prompt log-probabilities."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts = [TokensPrompt(prompt_token_ids=window) for window in held_out_windows()]
    scores = []
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for window, output in zip(held_out_windows(), outputs, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None and entries[0] is None and len(entries) == len(window)
        scores += [
            entry[token].logprob for entry, token in zip(entries[1:], window[1:], strict=True)
        ]
    return torch.tensor(scores)


def perplexity(logprobs: torch.Tensor) -> float:
    return math.exp(-logprobs.double().mean().item())


def test_the_checkpoint_is_trained() -> None:
    """Its card says 13 for long windows; beginnings of files are harder, guessing is 2,048."""
    scores = reference_logprobs(torch.float32)
    assert len(scores) == sum(WINDOWS) - len(WINDOWS)
    assert 13 < perplexity(scores) < 60


@pytest.mark.parametrize(
    ("dtype", "max_num_batched_tokens"),
    [
        (torch.bfloat16, 64),
        (torch.float32, 2048),
        *nightly((torch.bfloat16, 2048), (torch.float32, 64)),
    ],
)
def test_held_out_perplexity(
    dtype: torch.dtype, max_num_batched_tokens: int, make_engine: MakeEngine
) -> None:
    llm = make_engine(
        "qwen3_5",
        dtype,
        model=str(TRAINED),
        max_model_len=544,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    expected = reference_logprobs(dtype)
    found = engine_logprobs(llm)
    ratio = perplexity(found) / perplexity(expected)
    assert abs(ratio - 1) < TOLERANCE[dtype]
    if dtype == torch.float32:
        # Errors of both signs would cancel in the mean.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_held_out_perplexity_over_cached_state(dtype: torch.dtype, make_engine: MakeEngine) -> None:
    """Every window is scored at growing lengths, each continuing from what the one before left."""
    llm = make_engine(
        "qwen3_5", dtype, model=str(TRAINED), max_model_len=544, enable_prefix_caching=True
    )
    starts = torch.tensor([0, *WINDOWS[:-1]]).cumsum(0) - torch.arange(len(WINDOWS))
    expected, found = [], []
    for length in range(20, max(WINDOWS), 37):
        scored = [i for i, window in enumerate(held_out_windows()) if len(window) > length]
        prompts = [held_out_windows()[i][:length] for i in scored]
        following = [held_out_windows()[i][length] for i in scored]
        params = [
            SamplingParams(max_tokens=1, temperature=0, logprobs=0, allowed_token_ids=[token])
            for token in following
        ]
        batch = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(batch, params, use_tqdm=False)
        for i, token, output in zip(scored, following, outputs, strict=True):
            assert output.num_cached_tokens == (length - 37 if length > 20 else 0)
            assert output.outputs[0].logprobs is not None
            found.append(output.outputs[0].logprobs[0][token].logprob)
            expected.append(reference_logprobs(dtype)[starts[i] + length - 1])
    assert len(found) > 80
    ratio = perplexity(torch.tensor(found)) / perplexity(torch.stack(expected))
    assert abs(ratio - 1) < TOLERANCE[dtype]
    if dtype == torch.float32:
        torch.testing.assert_close(torch.tensor(found), torch.stack(expected), rtol=0, atol=1e-4)
