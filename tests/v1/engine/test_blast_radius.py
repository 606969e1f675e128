# SPDX-License-Identifier: Apache-2.0
"""An exception on behalf of one request ends that request: the engine and the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extraction_options import extraction
from tests.tiny_models import tiny_model
from vllm import EngineArgs, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.engine.batch_defaults import UsageContext
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import results
from vllm.v1.core.sched.kv_transfer import KVTransfer
from vllm.v1.engine import FAILURE_STAGES
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Metric
from vllm.v1.request import Request
from vllm.v1.worker import step_sampler

#: the prompt of the request that meets the fault begins with this, the others' do not
MARK = 77
VICTIM = [MARK, 1, 2, 3]
OTHERS = [[5, 6, 7], [9] * 40]
PARAMS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logit_bias": {3: 1.0}}


class Injected(Exception):
    """What the faults raise."""


def fail_for(
    patch: pytest.MonkeyPatch, owner: Any, name: str, is_victim: Callable[..., bool]
) -> None:
    """Let a function raise when it is called for the victim."""
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if is_victim(*args):
            raise Injected(name)
        return original(*args, **kwargs)

    patch.setattr(owner, name, faulty)


def has_victims_prompt(_: Any, request: Any, *more: Any) -> bool:
    return bool(request.prompt_token_ids[0] == MARK)


def fail_receive(patch: pytest.MonkeyPatch) -> None:
    name = "from_engine_core_request"
    fail_for(patch, Request, name, lambda request, *_: request.prompt_token_ids[0] == MARK)


def fail_look_up(patch: pytest.MonkeyPatch) -> None:
    fail_for(patch, KVCacheManager, "get_computed_blocks", has_victims_prompt)


def fail_connector_allocation(patch: pytest.MonkeyPatch) -> None:
    fail_for(patch, KVTransfer, "after_allocation", has_victims_prompt)


def fail_prepare(patch: pytest.MonkeyPatch) -> None:
    fail_for(patch, step_sampler.Adjustments, "__init__", lambda _, p, ids, *more: ids[0] == MARK)


def fail_sample(patch: pytest.MonkeyPatch) -> None:
    victims = []
    prepare = step_sampler.Adjustments.__init__

    def watched(self: Any, params: Any, token_ids: Any, *more: Any) -> None:
        prepare(self, params, token_ids, *more)
        if token_ids[0] == MARK:
            victims.append(self)

    def includes_victim(rows: Any, *more: Any) -> bool:
        return any(row.adjustments is victim for row in rows for victim in victims)

    patch.setattr(step_sampler.Adjustments, "__init__", watched)
    fail_for(patch, step_sampler, "adjusted_rows", includes_victim)


def fail_results(patch: pytest.MonkeyPatch) -> None:
    fail_for(patch, results, "check_stop", lambda request: request.prompt_token_ids[0] == MARK)


def fail_save(patch: pytest.MonkeyPatch) -> None:
    fail_for(patch, ExampleHiddenStatesConnector, "request_finished", has_victims_prompt)


def fail_output(patch: pytest.MonkeyPatch) -> None:
    victims = []
    start = Detokenizer.__init__

    def watched(self: Any, tokenizer: Any, prompt: list[int], *more: Any) -> None:
        start(self, tokenizer, prompt, *more)
        if prompt[0] == MARK:
            victims.append(self)

    patch.setattr(Detokenizer, "__init__", watched)
    fail_for(patch, Detokenizer, "update", lambda self, *_: any(self is v for v in victims))


FAULTS = [
    ("receive", fail_receive),
    ("schedule", fail_look_up),
    ("schedule", fail_connector_allocation),
    ("prepare", fail_prepare),
    ("sample", fail_sample),
    ("results", fail_results),
    ("save", fail_save),
    ("output", fail_output),
]
faults = pytest.mark.parametrize(
    ("stage", "inject"), FAULTS, ids=[inject.__name__.removeprefix("fail_") for _, inject in FAULTS]
)


def make_config(storage: Path, async_scheduling: bool) -> VllmConfig:
    args = EngineArgs(
        model=str(tiny_model("llama")),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        async_scheduling=async_scheduling,
        **extraction(storage),
    )
    return args.create_engine_config(UsageContext.LLM_CLASS)


def failures(metrics: list[Metric]) -> dict[str, int]:
    """Requests that failed, by stage; 0 for none left out."""
    return {
        metric.labels["stage"]: metric.value
        for metric in metrics
        if isinstance(metric, Counter) and metric.name == "vllm:request_failures" and metric.value
    }


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLMEngine]:
    config = make_config(tmp_path_factory.mktemp("rows"), request.param)
    made = LLMEngine(config, multiprocess=False)
    yield made
    made.shutdown()


def run(engine: LLMEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, SamplingParams(**PARAMS))
    ended: dict[str, RequestOutput] = {}
    for _ in range(200):
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
        if not engine.has_unfinished_requests():
            break
    return [ended[str(index)] for index in range(len(prompts))]


@faults
def test_one_request_ends_and_is_counted(
    engine: LLMEngine, stage: str, inject: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [OTHERS[0], VICTIM, OTHERS[1]]
    whole = [list(output.outputs[0].token_ids) for output in run(engine, prompts)]
    before = failures(engine.get_metrics())
    with monkeypatch.context() as patch:
        inject(patch)
        first, victim, last = run(engine, prompts)
    assert victim.outputs[0].finish_reason == "error"
    assert [list(o.outputs[0].token_ids) for o in (first, last)] == [whole[0], whole[2]]
    assert all(o.kv_transfer_params is not None for o in (first, last))
    after = failures(engine.get_metrics())
    assert {s: after.get(s, 0) - before.get(s, 0) for s in after} == {
        **dict.fromkeys(before, 0),
        stage: 1,
    }
    assert stage in FAILURE_STAGES
    again = run(engine, [VICTIM, *OTHERS, VICTIM])
    assert [list(o.outputs[0].token_ids) for o in again] == [whole[1], whole[0], whole[2], whole[1]]
    assert engine.reset_prefix_cache()


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("stage", "inject"), [("receive", fail_receive), ("output", fail_output)], ids=["core", "front"]
)
def test_over_a_process_too(
    stage: str, inject: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end counts what the core tells it, and what fails before the core hears of it."""

    async def run_one(engine: AsyncLLM, name: str, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        params = SamplingParams(**PARAMS)
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def main() -> None:
        engine = AsyncLLM(make_config(tmp_path, True))
        try:
            runs = [run_one(engine, str(i), p) for i, p in enumerate([OTHERS[0], VICTIM])]
            tokens, error = await asyncio.gather(*runs, return_exceptions=True)
            assert isinstance(tokens, list) and len(tokens) == 6
            assert isinstance(error, EngineGenerateError) and "Injected" in str(error)
            with monkeypatch.context() as patch:
                fail_for(patch, engine.input_processor, "process", lambda *_: True)
                with pytest.raises(Injected):
                    await run_one(engine, "input", [1])
            assert failures(engine.get_metrics()) == {stage: 1, "input": 1}
            assert len(await run_one(engine, "after", OTHERS[1])) == 6
        finally:
            engine.shutdown()

    inject(monkeypatch)
    asyncio.run(main())
