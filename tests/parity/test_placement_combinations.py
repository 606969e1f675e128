# SPDX-License-Identifier: Apache-2.0
"""Placements of a supernet beside what else an engine does: the tokens stay those of the equivalent
fixed model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from apriel2_models import Reference, Tensors, make_tensors, pattern, save, stochastic
from parity_checks import MakeEngine, generate, in_this_process, on_cpus, prompts

from tests.parity.in_process import runner_of
from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.rendering import RenderedPrompt
from vllm.entrypoints.openai.served_beams import ServedBeams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [pytest.mark.parity, in_this_process]

LAYERS = 2


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return make_tensors(stochastic(LAYERS))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return save(tmp_path_factory.mktemp("apriel2"), stochastic(LAYERS), tensors)


def assert_equals(tensors: Tensors, output: RequestOutput, names: list[str]) -> None:
    """Every token is the choice of the placement's equations, given those before it."""
    prompt, tokens = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
    reference = Reference(stochastic(len(names)), tensors, names)
    logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist(), names


@pytest.mark.parametrize("draft", ["itself", "a longer supernet", "a fixed model"])
def test_a_draft_model_keeps_its_mixers(
    draft: str, path: Path, tensors: Tensors, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Whatever the target's are, at the start and later: a supernet drafts with its main ones."""
    decoder = {
        "a longer supernet": stochastic(3, main="gdn"),
        "a fixed model": pattern(["kda"]),
    }.get(draft)
    smaller = path if decoder is None else save(tmp_path, decoder, make_tensors(decoder))
    drafter = {"method": "draft_model", "model": str(smaller), "num_speculative_tokens": 3}
    llm = make_engine("llama", model=str(path), placement="kda,gdn", speculative_config=drafter)
    read = []
    for names in (["kda", "gdn"], ["attention", "attention"], ["sliding_window", "kda"]):
        if read:
            llm.change_placement(names)
        for output in generate(llm, prompts((5, 40)), 8):
            assert_equals(tensors, output, names)
        weights = runner_of(llm).weights_read()
        read.append(weights.target)
        told = {one.what: one.why for one in llm.llm_engine.vllm_config.decisions.decisions()}
        assert told["cost of drafting"].endswith(f"by the target's, {weights.target}")
    assert len(set(read)) == 3


@pytest.mark.usefixtures("forking")
def test_beams_are_of_one_placement(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their steps is a request: a change waits for the last one, and one beside what runs
    is not for them."""
    args = AsyncEngineArgs(
        model=str(path),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_memory_bytes=2**22,
        placement_alias=["fast=all-gdn"],
    )
    choices, steps = ServedBeams._choices, 0

    async def run(engine: AsyncLLM) -> None:
        beams = ServedBeams(engine, None)

        async def search(placement: str | None = None) -> list[list[int]]:
            request = CompletionRequest(prompt=[], n=2, use_beam_search=True, ignore_eos=True)
            params = SamplingParams(max_tokens=8, placement=placement)
            prompt = RenderedPrompt(prompts((20,))[0])
            output = await beams.search(request, "beams", prompt, params)
            return [list(one.token_ids) for one in output.outputs]

        expected = {name: await search(name) for name in ("all-attention", "fast", "all-kda")}
        assert len({str(tokens) for tokens in expected.values()}) == 3
        changes: list[asyncio.Task[Any]] = []

        async def change_after_three(self: ServedBeams, *given: Any) -> Any:
            nonlocal steps
            steps += 1
            found = await choices(self, *given)
            if steps == 3:
                with pytest.raises(VLLMValidationError, match="requests are running"):
                    await engine.change_placement("all-kda", "refuse")
                await engine.change_placement("fast", "overlap")
                changes.append(asyncio.ensure_future(engine.change_placement("all-kda")))
                await asyncio.sleep(0)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(ServedBeams, "_choices", change_after_three)
            assert await search() == expected["all-attention"]
        await asyncio.gather(*changes)
        assert await search() == expected["all-kda"]
        assert await search("fast") == expected["fast"]

    engine = AsyncLLM.from_engine_args(args)
    try:
        asyncio.run(run(engine))
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("forking")
def test_who_was_held_back_is_asked_about_the_new_memory(path: Path) -> None:
    """A placement that has no room after a change is refused as one that never had any."""
    args = AsyncEngineArgs(
        model=str(path),
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=2**22,
        placement="all-gdn",
    )

    async def run(engine: AsyncLLM) -> None:
        started = asyncio.Event()

        async def one(name: str, placement: str | None, length: int) -> None:
            params = SamplingParams(max_tokens=length, ignore_eos=True, placement=placement)
            async for _ in engine.generate("x", params, name):
                started.set()

        first = asyncio.ensure_future(one("first", "all-kda", 120))
        await started.wait()
        change = asyncio.ensure_future(engine.change_placement("all-swa"))
        await asyncio.sleep(0)
        with pytest.raises(VLLMValidationError, match="kda,kda: .* more than a page of the arena"):
            await one("held back", "all-kda", 2)
        await asyncio.gather(first, change)
        await one("fits", "all-attention", 2)

    engine = AsyncLLM.from_engine_args(args)
    try:
        asyncio.run(run(engine))
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("mode", ["wait", "overlap"])
def test_a_caller_that_goes_leaves_a_change_that_is_known(path: Path, mode: str) -> None:
    """The front end's configuration is of the placement that the core has from then on."""
    args = AsyncEngineArgs(
        model=str(path), dtype="float32", max_model_len=256, kv_cache_memory_bytes=2**22
    )

    async def run(engine: AsyncLLM) -> None:
        change = asyncio.ensure_future(engine.change_placement("all-swa", mode))
        await asyncio.sleep(0)
        change.cancel()
        await asyncio.wait([change])
        placed = (await engine.collective_rpc("get_layer_placements"))[0]
        assert set(placed.values()) == {"sliding_window"}
        assert engine.model_config.placement == "all-swa"

    engine = AsyncLLM.from_engine_args(args)
    try:
        asyncio.run(run(engine))
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=on_cpus)])
def test_metrics_show_the_memory_that_there_is(path: Path, replicas: int) -> None:
    """Of each replica, after a change as in an engine that starts so."""
    settings: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 2**22,
        # Journals would be part of the given bytes after a change, and beside them at the start.
        "deferred_commit_tokens": 1,
        "disable_log_stats": False,
        "data_parallel_size": replicas,
    }

    def shown(llm: LLM) -> list[dict[str, str]]:
        found = [one.labels for one in llm.get_metrics() if one.name == "vllm:cache_config_info"]
        return sorted(found, key=lambda labels: labels["engine"])

    def run(placement: str, change: str | None = None) -> list[dict[str, str]]:
        llm = LLM(**settings, placement=placement)
        try:
            if change is not None:
                llm.change_placement(change)
            return shown(llm)
        finally:
            llm.shutdown()

    expected = run("all-gdn")
    assert len(expected) == replicas
    assert run("all-attention") != expected
    assert run("all-attention", "all-gdn") == expected


def test_listeners_hear_that_the_cache_is_empty(
    path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that they know are not found under another placement."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    llm = make_engine("llama", model=str(path), enable_prefix_caching=True, kv_events_config=events)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    told: list[str] = []
    monkeypatch.setattr(
        core._event_publisher,
        "publish",
        lambda batch: told.extend(type(event).__name__ for event in batch.events),
    )
    for _ in range(2):
        generate(llm, prompts((40,)), 2)
    llm.change_placement("all-gdn")
    generate(llm, prompts((40,)), 2)
    assert told[:2] == ["BlockStored", "AllBlocksCleared"] and set(told[2:]) == {"BlockStored"}
