# SPDX-License-Identifier: Apache-2.0
"""Steps made by hand, with real blocks, and the same steps without graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.padded_steps import PaddedSteps
from vllm.v1.worker.step_graphs import Replay, StepGraphs
from vllm.v1.worker.step_inputs import StepInputs

T = TypeVar("T")
MAX_MODEL_LEN = 512
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN)


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, family: str | Path, **settings: Any) -> Iterator[LLM]:
    """A tiny model's engine in this process; `family` may be a checkpoint."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(
        str(family if isinstance(family, Path) else tiny_model(family, torch.bfloat16)),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=24,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 * 2**20,
        **settings,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def on_worker(llm: LLM, function: Callable[..., T], *args: Any) -> T:
    """`function(runner, *args)` on the thread, and so the stream, that runs steps."""
    (result,) = llm.collective_rpc(lambda worker: function(worker.model_runner, *args))
    return cast(T, result)


class EagerSteps(StepGraphs):
    """Pads as `captured` does and launches what it recorded, without graphs."""

    def __init__(self, runner: ModelRunner, captured: StepGraphs) -> None:
        super().__init__()
        self._runner, self._captured = runner, captured
        steps = PaddedSteps(
            runner.inputs,
            runner.metadata,
            runner.block_tables,
            runner.journals,
            runner._forward,
            runner.compute_logits,
        )
        self._whole = {size: steps.decodes(size) for size in captured.sizes}
        # The staged arrays keep their addresses: these read what a step uploads.
        self._inputs: dict[int, StepInputs] = {}
        for size in captured.piecewise_sizes:
            self._inputs[size] = runner.inputs.padding(size, 0)[1]
            runner.block_tables.flush()

    def replay_for(self, order: Any) -> Replay | None:
        return self._captured.replay_for(order)

    def replay(self, chosen: Replay) -> Tensor:
        if chosen.whole:
            return self._whole[chosen.size]()
        return self._runner._forward(self._inputs[chosen.size])


@dataclass
class Outcome:
    """What steps replayed (None: nothing), and their outputs, bit for bit."""

    replays: list[Replay | None] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    memory: Tensor | None = None


class Driver:
    """Hands steps to a runner; every request gets pages of its own for `MAX_MODEL_LEN` tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._lengths: dict[str, int] = {}
        self._ended: set[str] = set()
        self._count = 0
        self._next_page = 1

    def step(self, prefills: dict[str, int], decodes: list[str]) -> None:
        """Prefill (`name -> tokens`; a known name continues its prompt) beside decodes."""
        new = [self._new(name) for name in prefills if name not in self._lengths]
        known = decodes + [name for name in prefills if name in self._lengths]
        cached = CachedRequestData(
            req_ids=known,
            new_block_ids=[None] * len(known),
            num_computed_tokens=[self._lengths[name] for name in known],
            num_output_tokens=[1] * len(known),
        )
        scheduled = dict.fromkeys(decodes, 1) | prefills
        output = SchedulerOutput(
            new, cached, scheduled, sum(scheduled.values()), sampling_req_ids=set(scheduled)
        )
        output.finished_req_ids, self._ended = self._ended, set()
        for name, count in scheduled.items():
            self._lengths[name] = self._lengths.get(name, 0) + count
        self.runner.execute_dummy(output)

    def end(self, names: list[str]) -> None:
        """These requests are gone from the next step on."""
        for name in names:
            del self._lengths[name]
        self._ended |= set(names)

    def _new(self, name: str) -> NewRequestData:
        self._count += 1
        return NewRequestData(
            req_id=name,
            prompt_token_ids=[(7 * i + 13 * self._count) % 256 for i in range(MAX_MODEL_LEN)],
            mm_features=[],
            sampling_params=GREEDY,
            pooling_params=None,
            block_ids=tuple(self._take(group) for group in range(len(self.runner.groups))),
            num_computed_tokens=0,
        )

    def _take(self, group_id: int) -> list[int]:
        """Blocks in pages that nobody else has."""
        table = self.runner.block_tables.groups[group_id]
        plan = self.runner.arena.plan
        per_page = plan.groups[group_id].blocks_per_page
        count = table.spec.blocks_for(MAX_MODEL_LEN + 1)
        first = self._next_page * per_page
        self._next_page += -(-count // per_page)
        assert self._next_page <= plan.num_pages, "the arena is too small for these requests"
        return list(range(first, first + count))

    def close(self) -> None:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self._lengths) | self._ended
        self.runner.forget(output)


@contextmanager
def observed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outcome]:
    """Steps on a cleared arena; their outputs, and the arena afterwards."""
    runner.arena.buffer.zero_()
    outcome = Outcome()
    run_model = ModelRunner._run_model

    def spy(self: ModelRunner, order: Any, inputs: Any, replay: Replay | None) -> Any:
        hidden, logits = run_model(self, order, inputs, replay)
        outcome.replays.append(replay)
        outcome.logits.append(logits.clone())
        if hidden is not None:
            outcome.hidden.append(hidden.clone())
        return hidden, logits

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_run_model", spy)
        yield outcome
    outcome.memory = runner.arena.buffer.clone()
