# SPDX-License-Identifier: Apache-2.0
"""Greedy text with each drafter is the text without, over 500 prompts and more for each kind of
state: in chunks, after preemptions, from shared beginnings, in several completions, among aborts.

`VLLM_TEST_PROMPTS` replaces the number of prompts.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from dflash_models import Block, write_dflash
from draft_models import TINY, mtp_tensors, with_mtp, write_eagle3
from parity_checks import MakeEngine, in_this_process
from tiny_models import make_tiny

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.core.sched.draft_policy import DraftPolicy

pytestmark = [pytest.mark.parity, pytest.mark.nightly, in_this_process]

NUM_PROMPTS = int(os.environ.get("VLLM_TEST_PROMPTS", "500"))
DRAFTS, ROWS, PADDING = 3, 32, 3
#: so few tokens that drafts of random layers are accepted now and then
SHAPE = dataclasses.replace(TINY, vocab=16, draft_vocab=8)
#: gated delta net, Kimi delta attention, attention
FAMILIES = ("qwen3_5", "kimi_linear", "llama")
#: only Qwen3.5 has a head in its checkpoint
METHODS = ("ngram", "eagle3", "dflash", "draft_model", "mtp")
CASES = [(f, m) for f in FAMILIES for m in METHODS if m != "mtp" or f == "qwen3_5"]


@lru_cache(len(FAMILIES))
def target_of(family: str, root: Path) -> Path:
    ends = {"eos_token_id": 2, "pad_token_id": PADDING}
    path = make_tiny(family, root / family, vocab_size=SHAPE.vocab, **ends)
    if family != "qwen3_5":
        return path
    return with_mtp(path, root / "with-mtp", mtp_tensors(SHAPE))


def speculation(family: str, method: str, target: Path, root: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    path = root / f"{family}-{method}"
    if method == "ngram":
        settings |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    elif method == "eagle3":
        settings["model"] = str(write_eagle3(path, target, SHAPE))
    elif method == "dflash":
        settings["model"] = str(write_dflash(path, target, SHAPE, Block()))
    elif method == "draft_model":
        # The target itself: all of its drafts are right; otherwise none is.
        settings["model"] = str(target)
    return settings


@lru_cache(1)
def prompts() -> list[list[int]]:
    """A third begins as another does; many are longer than a step, all of them than a chunk. None
    is padding alone: its embedding is zero, and of equal logits no text is the greedy one."""
    rng = random.Random(0)
    stems = [[rng.randrange(SHAPE.vocab) for _ in range(length)] for length in (33, 64, 120)]
    found = []
    for i in range(NUM_PROMPTS):
        stem = stems[i // 3 % 3] if i % 3 == 0 else []
        stem = stem[: rng.randrange(16, len(stem) + 1)] if stem else []
        found.append(
            stem + [rng.randrange(SHAPE.vocab) for _ in range(rng.choice((1, 3, 9, 17, 40, 90)))]
        )
    return [ids if set(ids) != {PADDING} else [PADDING + 1] for ids in found]


def texts(llm: LLM) -> tuple[list[list[list[int]]], int, int]:
    """Of each prompt, its completions; how many tokens came from the cache, and how many drafts
    were accepted. Now and then all requests are preempted, and others come and leave."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, 0

    def schedule_and_preempt() -> Any:
        nonlocal steps
        steps += 1
        if steps % 40 == 0:
            while scheduler.running:
                scheduler._preempt_last()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    outputs = []
    for start in range(0, NUM_PROMPTS, 100):
        batch = prompts()[start : start + 100]
        for i in range(4):
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            name = f"abandoned-{start}-{i}"
            engine.add_request(name, TokensPrompt(prompt_token_ids=batch[i] + [i]), params)
            for _ in range(1 + i):
                engine.step()
            engine.abort_request([name])
        # Greedy requests have one completion; sampling the likeliest token alone is greedy, too.
        forked: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "n": 2}
        params_of = [
            SamplingParams(
                max_tokens=6 + i % 9,
                ignore_eos=True,
                **(forked if i % 10 == 7 else {"temperature": 0.0}),
            )
            for i in range(len(batch))
        ]
        given = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
        outputs += llm.generate(given, params_of, use_tqdm=False)
    assert steps > 40 or NUM_PROMPTS < 100
    found = [[list(one.token_ids) for one in output.outputs] for output in outputs]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    accepted = sum((one.num_drafts or (0, 0))[0] for o in outputs for one in o.outputs)
    return found, cached, accepted


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("many")


@pytest.fixture(scope="session")
def plain() -> dict[str, list[list[list[int]]]]:
    """By family, what it says without a drafter."""
    return {}


@pytest.mark.parametrize(("family", "method"), CASES)
def test_many_prompts(
    family: str,
    method: str,
    root: Path,
    plain: dict[str, list[list[list[int]]]],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Drafts of random heads are hardly ever accepted, which never pays.
    choose: Callable[..., int] = lambda policy, count: policy.num_drafts  # noqa: E731
    monkeypatch.setattr(DraftPolicy, "choose", choose)
    target = target_of(family, root)
    settings: dict[str, Any] = {
        "model": str(target),
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 160,
        "enable_prefix_caching": True,
    }
    if family not in plain:
        plain[family], cached, _ = texts(make_engine(family, **settings))
        assert cached > NUM_PROMPTS
    drafted = make_engine(
        family, speculative_config=speculation(family, method, target, root), **settings
    )
    found, cached, accepted = texts(drafted)
    assert found == plain[family]
    assert cached > NUM_PROMPTS and accepted > NUM_PROMPTS // 10
