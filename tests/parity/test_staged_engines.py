# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers are divided into pipeline stages, a process or more each.

Dividing layers changes no arithmetic, so one process per stage gives the bits of one process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from parity_checks import MakeEngine, assert_equals_reference, generate, on_cpus, prompts
from tiny_models import tiny_model

from tests.extraction_options import extraction
from tests.nightly import nightly
from tests.v1.executor.fake_worker import gone
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    pytest.mark.usefixtures("forking"),
    on_cpus,
]

#: how long a step may take on the slowest machine
STEP_S = 60.0


def preempting(llm: LLM, count: int) -> Callable[[], int]:
    """The first `count` steps with running requests lose one; returns how many did so far."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, done = scheduler.schedule, 0

    def preempt_and_schedule() -> Any:
        nonlocal done
        if scheduler.running and done < count:
            scheduler._preempt_last()
            done += 1
        return schedule()

    scheduler.schedule = preempt_and_schedule
    return lambda: done


@pytest.mark.parametrize(
    ("family", "stages", "ranks"),
    [
        ("qwen3_5", 2, 1),
        ("llama3_rope", 2, 2),
        ("mixtral", 2, 1),
        *nightly(
            ("qwen3_5_tied", 2, 2),
            ("qwen3_5", 4, 1),
            ("qwen3_5_moe", 2, 1),
            ("gemma3", 3, 1),
            ("kimi_linear", 2, 1),
            ("nemotron_h_moe", 2, 1),
            ("granite_h", 2, 1),
            ("falcon_h1", 2, 1),
            ("gpt_oss", 2, 1),
            ("deepseek_v3", 2, 1),
            ("olmo_hybrid", 2, 1),
        ),
    ],
)
def test_greedy_text_equals_transformers(
    family: str, stages: int, ranks: int, make_engine: MakeEngine
) -> None:
    """Chunked, preempted, and a second time from the prefix cache."""
    llm = make_engine(
        family,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    preempted = preempting(llm, 3)
    for _ in range(2):
        outputs = generate(llm, prompts((1, 17, 63, 300)), 32)
        for output in outputs:
            assert_equals_reference(output, tiny_model(family), 32)
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0
    assert preempted() == 3


def test_a_stage_may_have_no_experts(make_engine: MakeEngine) -> None:
    """Of a hybrid with mixtures in some layers, of which ranks have whole experts."""
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    llm = make_engine("nemotron_h_moe", **sizes, enable_expert_parallel=True)
    assert llm.collective_rpc("has_experts") == [True, True, False, False]
    (output,) = generate(llm, prompts((17,)), 6)
    assert_equals_reference(output, tiny_model("nemotron_h_moe"), 6)


def results(llm: LLM, batch: list[list[int]], **fields: Any) -> list[Any]:
    """Tokens and all logprobs, to the last bit. One prompt at a time: a matmul's rounding depends
    on what else is in the step, and stages share requests out."""
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, **fields}
    found = []
    for ids in batch:
        prompted = TokensPrompt(prompt_token_ids=ids)
        (output,) = llm.generate(prompted, SamplingParams(**settings), use_tqdm=False)
        (one,) = output.outputs
        found.append((list(one.token_ids), one.logprobs, output.prompt_logprobs))
    return found


def test_stages_change_no_bit(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples, seeded ones, prompts' logprobs; before and after sleep. Penalties and grammars
    are followed on the last stage."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_sleep_mode": True}
    one = make_engine("qwen3_5", **settings)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    two = make_engine("qwen3_5", pipeline_parallel_size=2, **settings)
    batch = prompts((5, 33, 70))
    wanted = [
        {"prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 4},
    ]
    expected = [results(one, batch, **fields) for fields in wanted]
    assert [results(two, batch, **fields) for fields in wanted] == expected
    # Each stage has its own layers, by their names in the whole model.
    names = two.collective_rpc(lambda worker: sorted(dict(worker.get_model().named_parameters())))
    layers = [{n.split(".")[2] for n in own if n.startswith("model.layers.")} for own in names]
    assert layers == [{"0"}, {"1", "2", "3"}]
    assert "model.embed_tokens.weight" in names[0] and "lm_head.weight" not in names[0]
    assert "model.embed_tokens.weight" not in names[1] and "lm_head.weight" in names[1]
    for level in (1, 2):
        two.sleep(level)
        two.wake_up()
        assert results(two, batch, **wanted[0]) == expected[0]
    two.collective_rpc("reload_weights")
    assert results(two, batch, **wanted[0]) == expected[0]
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 3, "maxItems": 5}
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    constrained = SamplingParams(max_tokens=60, structured_outputs=constraint, seed=1)
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = two.generate(["x", "y", "z"], [constrained, free, constrained], use_tqdm=False)
    for output in (outputs[0], outputs[2]):
        assert 3 <= len(json.loads(output.outputs[0].text)) <= 5


def test_without_asynchronous_scheduling(make_engine: MakeEngine) -> None:
    llm = make_engine("llama", pipeline_parallel_size=2, async_scheduling=False)
    for output in generate(llm, prompts((3, 40, 17)), 16):
        assert_equals_reference(output, tiny_model("llama"), 16)


# ---- at the same time ----------------------------------------------------------------------------


def _meet(folder: str, first: int, last: int) -> Callable[[Worker], None]:
    """Makes forwards `first .. last` of the second stage wait for the next one of the first stage
    to begin, which in turn does not need them."""

    def install(worker: Worker) -> None:
        model, count = worker.get_model(), 0
        forward = model.forward

        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            Path(folder, f"{worker.rank}-{count}").touch()
            if worker.rank == 1 and first <= count <= last:
                deadline = time.monotonic() + STEP_S
                while not Path(folder, f"0-{count + 1}").exists():
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the first stage waits for forward {count}")
                    time.sleep(0.001)
            return forward(*args)

        model.forward = counted

    return install


@pytest.mark.parametrize("async_scheduling", [True, *nightly(False)])
def test_stages_work_at_the_same_time(
    async_scheduling: bool, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """While the second stage computes, the first one begins the next step."""
    llm = make_engine("llama", pipeline_parallel_size=2, async_scheduling=async_scheduling)
    llm.collective_rpc(_meet(str(tmp_path), 1, 20))
    for output in generate(llm, prompts((5, 6, 7, 8)), 16):
        assert_equals_reference(output, tiny_model("llama"), 16)
    # Two requests sample in each step.
    assert sum(one.name.startswith("1-") for one in tmp_path.iterdir()) >= 4 * 16 // 2


# ---- a death -------------------------------------------------------------------------------------


def _die_in(forward: int) -> Callable[[Worker], int]:
    def install(worker: Worker) -> int:
        model, left = worker.get_model(), forward
        own = model.forward

        def counted(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and worker.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args)

        model.forward = counted
        return os.getpid()

    return install


def test_a_death_ends_all_stages(make_engine: MakeEngine) -> None:
    llm = make_engine("llama", pipeline_parallel_size=3)
    workers = [psutil.Process(pid) for pid in llm.collective_rpc(_die_in(4))]
    with pytest.raises(WorkerDiedError, match="the worker of rank 1 died"):
        generate(llm, prompts((5, 6, 7)), 16)
    assert gone(workers)


# ---- hidden states -------------------------------------------------------------------------------


@pytest.fixture
def extract(make_engine: MakeEngine, tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    def run(name: str, **settings: Any) -> list[Any]:
        folder = tmp_path / name
        llm = make_engine(
            "qwen3_5",
            max_num_batched_tokens=64,
            enable_prefix_caching=True,
            **extraction(folder, [0, 1, 2, 4]),
            **settings,
        )
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        found = []
        for ids in 2 * prompts((5, 90, 33)):
            (output,) = llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
            assert output.kv_transfer_params is not None
            found.append(load_hidden_states(output.kv_transfer_params["hidden_states_path"]))
        assert len(list(folder.glob("*.safetensors"))) == len(found)
        return found

    yield run


def test_captured_rows_are_those_of_one_process(extract: Callable[..., list[Any]]) -> None:
    """Streams of all stages, in one file; the second time all but the last tokens are cached."""
    staged, whole = extract("two", pipeline_parallel_size=2), extract("one")
    for found, expected in zip(staged, whole, strict=True):
        assert torch.equal(found["token_ids"], expected["token_ids"])
        assert found["hidden_states"].shape == (len(found["token_ids"]), 4, 64)
        assert torch.equal(found["hidden_states"], expected["hidden_states"])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"pipeline_parallel_size": 5}, "4 layers, .* use at most 4 stages"),
        (
            "llama",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "method ngram: drafts are proposed where all layers are; use --tensor-parallel-size",
        ),
        (
            "llama",
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
                }
            },
            "kv_connector ExampleConnector, which needs all layers on every worker",
        ),
        ("llama", {"kv_offloading_size": 1.0}, "which needs all layers on every worker"),
        (
            "llama",
            {"distributed_executor_backend": "uni"},
            "with --pipeline-parallel-size 2 needs mp",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused(
    family: str, settings: dict[str, Any], message: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(family, **{"pipeline_parallel_size": 2, **settings})
