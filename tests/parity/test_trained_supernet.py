# SPDX-License-Identifier: Apache-2.0
"""The trained supernet: placements predict held-out text differently well, as in training."""

from __future__ import annotations

import json
import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from parity_checks import MakeEngine, one_stage
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vllm import SamplingParams, TokensPrompt

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "models" / "tiny-apriel2-supernet"
CARD: dict[str, float] = json.loads((TRAINED / "training.json").read_text())["perplexities"]
#: tokens of the windows; longer than the window of `sliding_window`, and not of whole chunks
WINDOWS = (448, 384, 300, 400, 256, 350, 200, 420)

pytestmark = [pytest.mark.slow, pytest.mark.parity]


def placement_of(short: str) -> list[str]:
    """`all-NAME` or `every2nd-NAME`, whose other layers are attention."""
    every, _, name = short.partition("-")
    return [name if every == "all" or i % 2 else "attention" for i in range(4)]


@cache
def windows() -> list[list[int]]:
    """Beginnings of the largest files that were held out of training."""
    from examples.python_library import is_held_out, library_files, library_root

    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    root = library_root()
    files = [path for path in library_files() if is_held_out(path.relative_to(root))]
    files.sort(key=lambda path: (-path.stat().st_size, path))
    texts = [path.read_text(encoding="utf-8", errors="replace")[:4000] for path in files]
    return [
        tokenizer(text, verbose=False).input_ids[:length]
        for text, length in zip(texts, WINDOWS, strict=False)
    ]


@cache
def trained_perplexities() -> dict[str, float]:
    """What the training model says of the windows."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from supernet_model import Sizes, Supernet
    finally:
        sys.path.remove(str(ROOT / "examples"))
    model = Supernet(Sizes(vocab=2048, context=2048))
    tensors = load_file(TRAINED / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in tensors.items()})
    found = {}
    for short in CARD:
        scores = []
        for ids in windows():
            with torch.no_grad():
                logits = model.logits(torch.tensor(ids)[None], placement_of(short))[0, :-1]
            scores.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]))
        found[short] = math.exp(-torch.cat(scores).mean())
    return found


def test_placements_differ_as_their_card_says() -> None:
    """Each is trained (guessing is 2,048) and none is another; recurrent layers are worth what
    they are on the card."""
    found = trained_perplexities()
    assert all(10 < value < 60 for value in found.values())
    assert len({round(value, 2) for value in found.values()}) == len(found)
    for name in ("gdn", "kda"):
        for perplexity in (CARD, found):
            one, half, all_of_it = (
                perplexity[short] for short in ("all-attention", f"every2nd-{name}", f"all-{name}")
            )
            assert one > half > all_of_it
            assert one > 1.1 * all_of_it


@one_stage
def test_the_engine_finds_the_same(make_engine: MakeEngine) -> None:
    """All placements in one batch, in chunks."""
    llm = make_engine(
        "llama",
        model=str(TRAINED),
        max_num_batched_tokens=96,
        placement_alias={short: placement_of(short) for short in CARD},
    )
    asked = [short for short in CARD for _ in windows()]
    params = [
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, placement=short)
        for short in asked
    ]
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in windows() * len(CARD)]
    scores: dict[str, list[float]] = {short: [] for short in CARD}
    for short, output in zip(asked, llm.generate(batch, params, use_tqdm=False), strict=True):
        ids, entries = output.prompt_token_ids or [], output.prompt_logprobs or []
        scores[short] += [
            entry[token].logprob for entry, token in zip(entries[1:], ids[1:], strict=True) if entry
        ]
    for short, expected in trained_perplexities().items():
        found = math.exp(-sum(scores[short]) / len(scores[short]))
        assert len(scores[short]) == sum(WINDOWS) - len(WINDOWS)
        assert abs(found / expected - 1) < 1e-3, short
