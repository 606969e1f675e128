# SPDX-License-Identifier: Apache-2.0
"""Requests aborted at any moment leave nothing behind: no queue entry, block, lock or file."""

from __future__ import annotations

import fcntl
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.nightly import covering
from tests.tiny_models import tiny_model
from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import InprocClient

pytestmark = [pytest.mark.slow, pytest.mark.extraction]

NUM_ACTIONS = 150


@contextmanager
def engine(family: str, path: Path, **options: Any) -> Iterator[LLMEngine]:
    hf_config = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    args = EngineArgs(
        str(tiny_model(family)),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": path},
        },
        **options,
    )
    made = LLMEngine.from_engine_args(args)
    try:
        yield made
    finally:
        made.shutdown()


class Hammer:
    """Adds, steps and aborts in random order; keeps what finished."""

    def __init__(self, llm: LLMEngine, seed: int) -> None:
        self._llm = llm
        self._rng = random.Random(seed)
        self._alive: list[str] = []
        self._count = 0
        self.num_aborted = 0
        self.num_finished = 0

    def act(self) -> None:
        action = self._rng.random()
        if action < 0.3:
            self._add()
        elif action < 0.5 and self._alive:
            self._abort()
        else:
            self.step()

    def _add(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 16, 17, 60, 150]))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 20, 90]),
            n=rng.choice([1, 1, 1, 3]),
            ignore_eos=True,
            seed=self._count,
            stop=rng.choice([None, "a"]),
            extra_args={"kv_transfer_params": {"include_output_tokens": rng.random() < 0.5}},
        )
        self._alive.append(f"request-{self._count}")
        self._count += 1
        self._llm.add_request(self._alive[-1], TokensPrompt(prompt_token_ids=prompt), params)

    def _abort(self) -> None:
        count = self._rng.randint(1, min(3, len(self._alive)))
        for request_id in self._rng.sample(self._alive, count):
            outputs = self._llm.abort_request(request_id)
            assert outputs and outputs[-1].finished
            self._alive.remove(request_id)
            self.num_aborted += 1

    def step(self) -> None:
        for output in self._llm.step():
            if output.finished:
                assert [c.finish_reason for c in output.outputs if c.finish_reason == "error"] == []
                self._alive.remove(output.request_id)
                self.num_finished += 1

    def drain(self) -> None:
        while self._llm.has_unfinished_requests():
            self.step()
        assert not self._alive


def assert_nothing_is_left(llm: LLMEngine, path: Path) -> None:
    """Looks into every part that keeps something per request."""
    llm.engine_core.flush()
    assert isinstance(llm.engine_core, InprocClient)
    core = llm.engine_core.engine_core
    assert not core.has_work()
    scheduler = core.scheduler
    assert isinstance(scheduler, Scheduler)
    assert not scheduler.requests and not scheduler.running and not len(scheduler.waiting)
    assert scheduler.kv_cache_manager.usage == 0
    assert scheduler.transfer is not None
    assert not scheduler.transfer.sending and not scheduler.transfer.loading
    connector = scheduler.connector
    assert isinstance(connector, ExampleHiddenStatesConnector)
    assert not connector._filenames and not connector._pending
    [worker] = core.collective_rpc(lambda _: get_kv_transfer_group())
    assert isinstance(worker, ExampleHiddenStatesConnector) and worker._saver is not None
    worker._saver._executor.shutdown()
    assert not worker._saver._targets and not worker._saver._copying and not worker._saver._waiting
    assert not list(path.glob(".*"))
    for lock in path.glob("*.lock"):
        assert lock.with_suffix("").exists(), "the lock file of a request that has no file"
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("seed", "family", "num_pages", "async_scheduling"),
    covering(range(3), ["llama", "qwen3_5"], [None, 20], [True, False]),
)
def test_random_aborts(
    family: str,
    num_pages: int | None,
    async_scheduling: bool,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with engine(
        family, tmp_path, num_gpu_blocks_override=num_pages, async_scheduling=async_scheduling
    ) as llm:
        hammer = Hammer(llm, seed)
        for _ in range(NUM_ACTIONS):
            hammer.act()
        hammer.drain()
        assert hammer.num_aborted and hammer.num_finished
        assert_nothing_is_left(llm, tmp_path)
        stored = len(list(tmp_path.glob("*.safetensors")))
        assert stored >= hammer.num_finished
