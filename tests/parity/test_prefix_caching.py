# SPDX-License-Identifier: Apache-2.0
"""Continuing from cached state gives what computing everything gives.

Bit for bit where the same tokens go through the same kernels in the same pieces;
docs/state_memory.md says where that is so. Each mechanism is also broken on purpose, and the
check has to notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import (
    MakeEngine,
    assert_equals_reference,
    core_in_this_process,
    one_replica,
    prompts,
)
from tiny_models import hf_reference_logits, tiny_model

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.v1.core.checkpoint_keeper import CheckpointKeeper
from vllm.v1.core.single_type_kv_cache_manager import RecurrentManager
from vllm.v1.request import Request
from vllm.v1.worker.arena import Arena

pytestmark = pytest.mark.parity

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
#: chunk of the gated delta rule, and here also of prefills
CHUNK = 64


def run(
    llm: LLM, *token_ids: list[int], max_tokens: int = 12, **fields: Any
) -> list[RequestOutput]:
    """`cache_*` fields go to the prompts, the others to the sampling parameters."""
    cache = {k: fields.pop(k) for k in list(fields) if k.startswith(("cache_", "return_cache"))}
    settings = {"temperature": 0, "ignore_eos": True, "logprobs": 0, **fields}
    params = SamplingParams(max_tokens=max_tokens, **settings)
    batch = [TokensPrompt(prompt_token_ids=ids, **cache) for ids in token_ids]
    return llm.generate(batch, params, use_tqdm=False)


def bits(outputs: list[RequestOutput]) -> list[tuple[int, float]]:
    """Every token with its exact logprob."""
    return [
        (token, entry[token].logprob)
        for output in outputs
        for completion in output.outputs
        for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]


def history(output: RequestOutput) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


# ---- the same bits -------------------------------------------------------------------------------


def same_bits_from_aligned_checkpoints(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    """A second prompt shares 128 tokens with the first, which left checkpoints every chunk."""
    shared, first, second = prompts((2 * CHUNK, 40, CHUNK + 1))
    settings = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    expected = run(make_engine("qwen3_5", dtype, **settings), shared + second)
    llm = make_engine("qwen3_5", dtype, enable_prefix_caching=True, **settings)
    run(llm, shared + first, cache_checkpoints=[CHUNK, 2 * CHUNK])
    (found,) = run(llm, shared + second)
    assert found.num_cached_tokens == 2 * CHUNK
    assert bits([found]) == bits(expected)


def same_bits_from_forks(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    """Four samples fork from one prefill; without a cache each computes its own."""
    (prompt,) = prompts((2 * CHUNK + 1,))
    # One graph size: on a GPU a batch of one is padded to four, so every step has the same kernels.
    graphs = {"cudagraph_capture_sizes": [4]}
    settings = {
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 4,
        "compilation_config": graphs,
    }
    sampling = {"n": 4, "temperature": 1.0, "seed": 7}
    uncached = make_engine("qwen3_5", dtype, **settings)
    expected = [run(uncached, prompt, temperature=1.0, seed=7 + i)[0] for i in range(4)]
    llm = make_engine("qwen3_5", dtype, enable_prefix_caching=True, **settings)
    found = run(llm, prompt, **sampling)
    assert len({tuple(c.token_ids) for c in found[0].outputs}) > 1
    assert bits(found) == bits(expected)


def same_bits_after_partial_eviction(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    """A block of attention is gone: what is left of the prefix is continued."""
    (prompt,) = prompts((3 * CHUNK + 1,))
    settings = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 2}
    expected = bits(run(make_engine("qwen3_5", dtype, **settings), prompt))
    llm = make_engine("qwen3_5", dtype, enable_prefix_caching=True, **settings)
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    (attention,) = [m for m in manager.managers if not isinstance(m, RecurrentManager)]
    hashes = Request("probe", prompt, None, block_hasher=core._block_hasher).block_hashes
    marks = [CHUNK, 2 * CHUNK]
    assert bits(run(llm, prompt, cache_checkpoints=marks)) == expected
    for evicted, cached in ((None, 3 * CHUNK), (9, 2 * CHUNK), (5, CHUNK), (1, 0)):
        if evicted is not None:
            block = manager.block_pool.get_cached_block(hashes[evicted], attention.group_id)
            manager.block_pool.uncache_block(block)
        (found,) = run(llm, prompt, cache_checkpoints=marks)
        assert found.num_cached_tokens == cached
        assert bits([found]) == expected


def same_bits_after_preemption(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    """A preempted request continues from the state it had, as if nothing had happened."""
    (prompt,) = prompts((2 * CHUNK + 1,))
    for async_scheduling in (False, True):
        settings = {
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 4,
            "async_scheduling": async_scheduling,
        }
        expected = run(make_engine("qwen3_5", dtype, **settings), prompt, max_tokens=24)
        llm = make_engine("qwen3_5", dtype, enable_prefix_caching=True, **settings)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, steps, preemptions = scheduler.schedule, 0, 0

        def schedule_and_preempt(scheduler: Any = scheduler, schedule: Any = schedule) -> Any:
            nonlocal steps, preemptions
            steps += 1
            if steps in (9, 15, 16):
                while scheduler.running:
                    scheduler._preempt_last()
                    preemptions += 1
            return schedule()

        scheduler.schedule = schedule_and_preempt
        found = run(llm, prompt, max_tokens=24)
        assert preemptions >= 2
        assert bits(found) == bits(expected)


CHECKS = [
    same_bits_from_aligned_checkpoints,
    same_bits_from_forks,
    pytest.param(same_bits_after_partial_eviction, marks=core_in_this_process),
    pytest.param(same_bits_after_preemption, marks=core_in_this_process),
]


@DTYPES
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bits(check: Any, dtype: torch.dtype, make_engine: MakeEngine) -> None:
    check(make_engine, dtype)


def _skip_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "copy_blocks", lambda self, copies: None)


def _keep_states_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are found one token later than they were taken."""
    cache = CheckpointKeeper._cache

    def shifted(
        self: Any, manager: Any, request: Any, block: Any, start: int, position: int
    ) -> None:
        cache(self, manager, request, block, start, min(position + 1, request.num_tokens))

    monkeypatch.setattr(CheckpointKeeper, "_cache", shifted)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("breakage", [_skip_copies, _keep_states_elsewhere])
def test_breaking_the_mechanism_is_noticed(
    breakage: Any, check: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    with pytest.raises(AssertionError):
        check(make_engine, torch.float32)


# ---- the same answer -----------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_conversation_computes_every_token_once(
    async_scheduling: bool, make_engine: MakeEngine
) -> None:
    llm = make_engine(
        "qwen3_5",
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
    )
    tokens: list[int] = []
    # 56 + 9 tokens end a block exactly, with the token that fills it sampled but never sent back.
    for question, length in zip(prompts((56, 1, 30, 17, 90)), (9, 7, 20, 1, 11), strict=True):
        (output,) = run(llm, tokens + question, max_tokens=length)
        # The last token of an answer is sampled but not computed.
        assert output.num_cached_tokens == max(len(tokens) - 1, 0)
        assert_equals_reference(output, tiny_model("qwen3_5"), max_tokens=length)
        tokens = history(output)


def test_cached_state_is_as_exact_as_computed_state(make_engine: MakeEngine) -> None:
    """After a turn reached by decode and an unaligned mark, against transformers in fp64."""
    model = tiny_model("qwen3_5")
    question, second, third = prompts((37, 21, 30))
    uncached = make_engine("qwen3_5", max_num_batched_tokens=64)
    llm = make_engine("qwen3_5", enable_prefix_caching=True, max_num_batched_tokens=64)
    (first,) = run(llm, question, max_tokens=40)
    errors = {}
    for name, engine in (("cached", llm), ("uncached", uncached)):
        turn = history(first) + second
        outputs = run(engine, turn, cache_checkpoints=[len(turn) - 13])
        outputs += run(engine, turn[:-13] + third)
        worst = 0.0
        for output in outputs:
            tokens, prompt = list(output.outputs[0].token_ids), list(output.prompt_token_ids)
            logits = hf_reference_logits(model, prompt + tokens[:-1], torch.float64)
            expected = logits[len(prompt) - 1 :].log_softmax(-1)
            got = torch.tensor([value for _, value in bits([output])], dtype=torch.float64)
            expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            worst = max(worst, (got - expected).abs().max().item())
        errors[name] = worst
        if name == "cached":
            assert [o.num_cached_tokens for o in outputs] == [76, len(turn) - 13]
    assert errors["cached"] < 2 * errors["uncached"] + 1e-6, errors


def test_greedy_text_of_the_demo_model_does_not_change(make_engine: MakeEngine) -> None:
    settings = {"model": str(TRAINED), "max_model_len": 512}
    cached = make_engine("qwen3_5", enable_prefix_caching=True, **settings)
    uncached = make_engine("qwen3_5", **settings)
    tokenizer = cached.get_tokenizer()
    text = 'def read(path):\n    """Return'
    for addition in (" the lines", "\n\n\nclass Reader:\n", "\n    def close(self):\n"):
        tokens = tokenizer(text + addition).input_ids
        (found,) = run(cached, tokens, max_tokens=24)
        (expected,) = run(uncached, tokens, max_tokens=24)
        assert found.outputs[0].text == expected.outputs[0].text
        text = text + addition + found.outputs[0].text
    assert found.num_cached_tokens > 0


# ---- sharing -------------------------------------------------------------------------------------


@one_replica
def test_one_prefill_for_all_samples_and_identical_prompts(make_engine: MakeEngine) -> None:
    """Tokens computed = one prompt, then one last token and the answer per completion."""
    llm = make_engine("qwen3_5", enable_prefix_caching=True, disable_log_stats=False)
    before = computed_tokens(llm)
    (prompt,) = prompts((100,))
    outputs = run(llm, prompt, prompt, prompt, n=2, temperature=1.0, max_tokens=1)
    assert computed_tokens(llm) - before == 99 + 6
    assert sorted(o.num_cached_tokens for o in outputs) == [0, 99, 99]


def computed_tokens(llm: LLM) -> float:
    """Prompt tokens of all requests, samples counted one by one, less those found."""
    metrics = {m.name: m for m in llm.get_metrics()}
    return metrics["vllm:prefix_cache_queries"].value - metrics["vllm:prefix_cache_hits"].value


def test_a_learnt_divergence(make_engine: MakeEngine) -> None:
    llm = make_engine("qwen3_5", enable_prefix_caching=True)
    shared, *tails = prompts((75, 20, 20, 20))
    cached = [run(llm, shared + tail)[0].num_cached_tokens for tail in tails]
    assert cached == [0, 0, 64]


def test_receipts(make_engine: MakeEngine) -> None:
    llm = make_engine("qwen3_5", enable_prefix_caching=True, disable_log_stats=False)
    shared, *tails = prompts((75, 20, 20))
    (first,) = run(llm, shared + tails[0], return_cache_report=True)
    assert first.cache_report is not None
    assert (first.cache_report.cached_tokens, first.cache_report.reason) == (0, None)
    (second,) = run(llm, shared + tails[1], return_cache_report=True)
    report = second.cache_report
    assert report is not None
    assert (report.prompt_tokens, report.cached_tokens, report.lost_tokens) == (95, 0, 64)
    assert report.reason == "no_checkpoint"
    matched = {match.kind: match.matched_tokens for match in report.groups}
    assert matched == {"FullAttentionSpec": 64, "MambaSpec": 0}
    assert report.groups[report.limited_by].kind == "MambaSpec"
    (third,) = run(llm, shared + tails[1], cache_salt="other", return_cache_report=True)
    assert third.cache_report is not None and third.cache_report.reason == "salt"
    (scored,) = run(llm, shared, prompt_logprobs=0, return_cache_report=True)
    assert scored.cache_report is not None and scored.cache_report.reason == "not_read"
    assert run(llm, shared)[0].cache_report is None
    lost = [m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_lost_tokens"]
    assert {m.labels["reason"]: m.value for m in lost}["no_checkpoint"] == 64
