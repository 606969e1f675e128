# SPDX-License-Identifier: Apache-2.0
"""Engine cores under traffic, without processes: the real scheduler and prefix cache, tokens of no
cost, and a clock that ticks once per step of every core."""

from __future__ import annotations

import heapq
import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tests.v1.engine.fakes import BLOCK_SIZE, VOCAB_SIZE, FakeExecutor, make_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.replica_board import ReplicaBoard
from vllm.v1.engine.replica_choice import ReplicaChooser
from vllm.v1.engine.replica_router import PromptChains, ReplicaRouter
from vllm.v1.outputs import ModelRunnerOutput

_MAX_LEN = 2048


class CountingExecutor(FakeExecutor):
    """Samples a random token for whoever is due, and counts what it would have computed."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.num_tokens = 0
        self._random = random.Random(0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.num_tokens += scheduler_output.total_num_scheduled_tokens
        result = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        for req_id in scheduler_output.num_scheduled_tokens:
            due = req_id in scheduler_output.sampling_req_ids
            result.req_ids.append(req_id)
            result.sampled_token_ids.append([self._random.randrange(20, VOCAB_SIZE)] if due else [])
            result.num_verified.append(0)
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(result)
        return done


@dataclass
class Conversation:
    """Turns of `(user tokens, generated tokens, ticks before the next)`; `history` so far."""

    start: int
    turns: list[tuple[list[int], int, int]]
    system: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)


def conversations(
    seed: int, count: int, most_turns: int, ticks_between: float, num_systems: int = 4
) -> list[Conversation]:
    """Random ones that share a few system prompts, and arrive at random."""
    draw = random.Random(seed)
    systems = [draw.choices(range(20, VOCAB_SIZE), k=40 + 30 * i) for i in range(num_systems)]
    made, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(1 / ticks_between)
        turns = [
            (
                draw.choices(range(20, VOCAB_SIZE), k=draw.randint(20, 120)),
                draw.randint(5, 40),
                draw.randint(10, 200),
            )
            for _ in range(draw.randint(1, most_turns))
        ]
        system = draw.choice(systems) if systems else []
        made.append(Conversation(int(now), turns, system))
    return made


class Replicas:
    """`count` cores behind one router; for one core everything goes there.

    `num_blocks`, `budget`: state memory and tokens per step, of each.
    """

    def __init__(self, count: int, num_blocks: int, budget: int) -> None:
        self.cores = []
        for _ in range(count):
            config = make_vllm_config(
                max_model_len=_MAX_LEN,
                num_blocks=num_blocks,
                max_num_batched_tokens=budget,
                max_num_seqs=64,
            )
            self.cores.append(EngineCore(config, CountingExecutor))
        capacities = [num_blocks * BLOCK_SIZE] * count
        self.board = ReplicaBoard(count, count * num_blocks)
        self.chooser = ReplicaChooser(self.board, capacities, BLOCK_SIZE)
        self.router = ReplicaRouter(self.chooser, PromptChains(BLOCK_SIZE), 0)
        self.hit_tokens = self.prompt_tokens = 0
        #: of each turn
        self.waits: list[int] = []

    @property
    def computed(self) -> list[int]:
        """Tokens of each core so far."""
        found: list[int] = [core.executor.num_tokens for core in self.cores]  # type: ignore[attr-defined]
        return found

    def run(self, traffic: list[Conversation]) -> None:
        """Until all conversations have ended."""
        due = [(one.start, index, 0) for index, one in enumerate(traffic)]
        heapq.heapify(due)
        running: dict[str, tuple[int, int, int]] = {}
        now = 0
        while due or running:
            if not running:
                now = max(now, due[0][0])
            while due and due[0][0] <= now:
                _, index, turn = heapq.heappop(due)
                one = traffic[index]
                user, max_tokens, _ = one.turns[turn]
                one.history = (one.history or list(one.system)) + user
                name = f"{index}-{turn}"
                self._send(name, list(one.history), max_tokens)
                running[name] = (index, turn, now)
            now += 1
            for rank, core in enumerate(self.cores):
                if not core.has_work():
                    continue
                for outputs in core.step().values():
                    outputs.engine_index = rank
                    self.router.observe(outputs)
                    for output in outputs.outputs:
                        index, turn, sent = running[output.request_id]
                        traffic[index].history += output.new_token_ids
                        if output.times is not None:
                            self.hit_tokens += output.num_cached_tokens or 0
                            self.waits.append(now - sent)
                        if output.finish_reason is None:
                            continue
                        del running[output.request_id]
                        if turn + 1 < len(traffic[index].turns):
                            pause = traffic[index].turns[turn][2]
                            heapq.heappush(due, (now + pause, index, turn + 1))

    def _send(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.prompt_tokens += len(prompt)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(name, prompt, params, 0.0)
        for replica, placed in self.router.place([request]).items():
            for one in placed:
                core = self.cores[replica]
                assert core.add_request(core.receive(one)) is None

    def shutdown(self) -> None:
        """Stop the cores."""
        for core in self.cores:
            core.shutdown()
