# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: the choice alone, then with real caches under traffic."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nightly import nightly
from tests.v1.engine.replica_traffic import Replicas, conversations
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.replica_board import ReplicaBoard
from vllm.v1.engine.replica_choice import Choice, ReplicaChooser, Work
from vllm.v1.engine.replica_router import PromptChains, ReplicaRouter

pytestmark = pytest.mark.slow

BLOCK = 16
CHAINS = PromptChains(BLOCK)


def work_of(
    tokens: list[int], max_tokens: int = 16, salt: str | None = None, placement: str | None = None
) -> Work:
    params = SamplingParams(placement=placement)
    request = EngineCoreRequest("r", tokens, params, 0.0, cache_salt=salt)
    return Work(CHAINS.of(request), len(tokens), max_tokens)


def tokens_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=length)


class Engine:
    """A chooser whose requests run when they are told to."""

    def __init__(self, replicas: int, capacity: int = 1 << 20) -> None:
        self.board = ReplicaBoard(replicas, 1 << 12)
        self.chooser = ReplicaChooser(self.board, [capacity] * replicas, BLOCK)
        self.count = 0

    def send(self, work: Work, pinned: int | None = None) -> tuple[str, Choice]:
        name = f"r{self.count}"
        self.count += 1
        choice = self.chooser.choose(work, pinned)
        self.chooser.start(choice, work, [name])
        return name, choice

    def run(self, work: Work, pinned: int | None = None) -> Choice:
        """From its first token to its end."""
        name, choice = self.send(work, pinned)
        self.chooser.began(name)
        self.chooser.generated(choice.replica, work.max_tokens)
        self.chooser.ended(name)
        return choice


def test_turns_stay_with_their_state_while_loads_are_even() -> None:
    engine = Engine(4)
    homes = {}
    for one in range(8):
        homes[one] = engine.run(work_of(tokens_of(one, 100))).replica
    assert set(homes.values()) == {0, 1, 2, 3}
    for turn in range(1, 5):
        for one, home in homes.items():
            choice = engine.run(work_of(tokens_of(one, 100) + tokens_of(one + 50, 30 * turn)))
            assert choice.replica == home and choice.reason == "prefix"
            assert choice.hit_tokens >= 96


def test_what_is_saved_is_weighed_against_what_waits() -> None:
    engine = Engine(2)
    prompt = tokens_of(0, 320)
    engine.run(work_of(prompt), pinned=0)
    engine.send(work_of(tokens_of(1, 400)), pinned=0)
    assert engine.chooser.choose(work_of([*prompt, 1])).replica == 0
    for seed in range(2, 6):
        engine.send(work_of(tokens_of(seed, 400)), pinned=0)
    moved = engine.chooser.choose(work_of([*prompt, 1]))
    assert (moved.replica, moved.reason, moved.hit_tokens) == (1, "load", 0)


def test_a_prefix_may_live_on_several_replicas() -> None:
    engine = Engine(3)
    prompt = tokens_of(0, 160)
    for rank in (0, 2):
        engine.run(work_of(prompt), pinned=rank)
    hits = engine.board.recall(work_of(prompt).chain, np.full(3, 1 << 20))
    assert hits.tolist() == [10, 0, 10]
    engine.send(work_of(tokens_of(1, 2000)), pinned=0)
    assert engine.chooser.choose(work_of([*prompt, 7])).replica == 2


def test_prefixes_age_as_the_replica_takes_others() -> None:
    engine = Engine(2, capacity=1000)
    prompt = tokens_of(0, 160)
    engine.run(work_of(prompt), pinned=1)
    for seed in range(1, 4):
        engine.run(work_of(tokens_of(seed, 200)), pinned=1)
    assert engine.chooser.choose(work_of(prompt), pinned=1).hit_tokens == 159
    for seed in range(4, 8):
        engine.run(work_of(tokens_of(seed, 200)), pinned=1)
    assert engine.chooser.choose(work_of(prompt), pinned=1).hit_tokens == 0
    engine.run(work_of(prompt), pinned=1)
    engine.chooser.board.forget()
    assert engine.chooser.choose(work_of(prompt), pinned=1).hit_tokens == 0


def test_prefixes_age_by_what_the_replica_holds_now() -> None:
    engine, prompt = Engine(2, capacity=1000), tokens_of(0, 160)
    engine.chooser.use_capacities([500, 4000])
    for rank in (0, 1):
        for seed in (0, *range(1, 8)):
            engine.run(work_of(tokens_of(seed, 160 if seed == 0 else 200)), pinned=rank)
    hits = [engine.chooser.choose(work_of(prompt), pinned=rank).hit_tokens for rank in (0, 1)]
    assert hits == [0, 159]


def test_salts_part_equal_prompts() -> None:
    prompt = tokens_of(0, 64)
    plain, salted, again = (work_of(prompt, salt=salt).chain for salt in (None, "a", "a"))
    assert not set(plain.tolist()) & set(salted.tolist())
    assert salted.tolist() == again.tolist() and len(salted) == 4 and salted.all()


def test_placements_of_a_supernet_part_equal_prompts() -> None:
    """The prefix cache finds for a request what requests of its placement computed."""
    engine, prompt = Engine(2), tokens_of(0, 64)
    engine.run(work_of(prompt, placement="fast"), pinned=0)
    for placement, salt in ((None, None), ("good", None), ("fast", "a"), ("good", "fast")):
        assert engine.chooser.choose(work_of(prompt, 16, salt, placement), 0).hit_tokens == 0
    assert engine.chooser.choose(work_of(prompt, placement="fast")).reason == "prefix"


def test_keys_are_the_same_in_all_processes() -> None:
    code = (
        "from vllm.sampling_params import SamplingParams\n"
        "from vllm.v1.engine import EngineCoreRequest\n"
        "from vllm.v1.engine.replica_router import PromptChains\n"
        "tokens = list(range(64))\n"
        "request = EngineCoreRequest('r', tokens, SamplingParams(), 0.0, cache_salt='a')\n"
        "print(PromptChains(16).of(request).tolist())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )
    assert found.stdout.split("\n")[-2] == str(work_of(list(range(64)), salt="a").chain.tolist())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400), st.integers(0, 3)), max_size=60),
    st.integers(2, 5),
)
def test_all_that_is_counted_ends(events: list[tuple[int, int, int]], replicas: int) -> None:
    """Requests that begin, end and are given up in any order leave nothing behind."""
    engine = Engine(replicas)
    running: list[str] = []
    for seed, length, kind in events:
        if kind == 0 and running:
            engine.chooser.ended(running.pop(0))
        elif kind == 1 and running:
            engine.chooser.began(running[-1])
        else:
            running.append(engine.send(work_of(tokens_of(seed, length)))[0])
        assert min(engine.chooser.loads) >= 0
    for name in running:
        engine.chooser.ended(name)
        engine.chooser.ended(name)
    assert engine.chooser.loads == [0] * replicas


def test_a_request_that_awaits_its_stop_can_still_be_told_of_it() -> None:
    """Its core has its tokens and a reason to finish, but the front end says where it stops."""
    engine = Engine(2)
    router = ReplicaRouter(engine.chooser, CHAINS, 0)
    params = SamplingParams(max_tokens=4, stop=["a"])
    [(replica, [request])] = router.place(
        [EngineCoreRequest("r", tokens_of(0, 20), params, 0.0)]
    ).items()
    last = EngineCoreOutput(request.request_id, [1], finish_reason=FinishReason.LENGTH)
    for awaits_stop, told in ((True, {replica: ["r"]}), (False, {})):
        last.awaits_stop = awaits_stop
        router.observe(EngineCoreOutputs(outputs=[last], engine_index=replica))
        assert router.by_replica(["r"], str) == told


def test_random_traffic_is_even_and_no_replica_starves() -> None:
    engine, draw = Engine(4), random.Random(1)
    running: list[str] = []
    chosen: list[int] = []
    for seed in range(600):
        work = work_of(tokens_of(seed, draw.randint(10, 800)), draw.randint(1, 200))
        name, choice = engine.send(work)
        running.append(name)
        chosen.append(choice.replica)
        while len(running) > draw.randint(4, 40):
            engine.chooser.ended(running.pop(draw.randrange(len(running))))
    assert all(set(chosen[i : i + 20]) == {0, 1, 2, 3} for i in range(0, 600, 20))
    clocks = engine.board.clocks
    assert abs(clocks / clocks.mean() - 1).max() < 0.1


def test_a_replica_with_one_hot_prefix_still_gets_others() -> None:
    engine = Engine(2)
    hot = tokens_of(0, 4000)
    for turn in range(300):
        engine.run(work_of([*hot, turn], max_tokens=64), pinned=0)
    homes = [engine.run(work_of(tokens_of(seed, 500))).replica for seed in range(1, 400)]
    assert {0, 1} == set(homes[-40:])


def test_front_ends_share_a_board(tmp_path: Path) -> None:
    path = str(tmp_path / "board")
    boards = [ReplicaBoard(2, 1 << 10, 3, path) for _ in range(3)]
    first, second = (
        ReplicaChooser(board, [1 << 20] * 2, BLOCK, place) for place, board in enumerate(boards[:2])
    )
    work = work_of(tokens_of(0, 200))
    choice = first.choose(work, pinned=1)
    first.start(choice, work, ["a"])
    assert second.loads == first.loads and second.loads[1] >= 200
    assert second.choose(work_of(tokens_of(1, 200))).replica == 0, "the other front end's load"
    first.began("a")
    seen = second.choose(work_of([*tokens_of(0, 200), 5]))
    assert (seen.replica, seen.hit_tokens) == (1, 192), "and its prefixes"
    boards[2].clear(0)
    assert second.loads == [0, 0]
    boards[2].forget()
    assert second.choose(work, pinned=1).hit_tokens == 0


def test_a_full_table_forgets_what_is_oldest() -> None:
    board = ReplicaBoard(2, 64)
    chooser = ReplicaChooser(board, [1 << 30] * 2, BLOCK)
    works = [work_of(tokens_of(seed, 16)) for seed in range(400)]
    for index, work in enumerate(works):
        chooser.start(chooser.choose(work, pinned=0), work, [str(index)])
    hits = [int(board.recall(work.chain, np.full(2, 1 << 30))[0]) for work in works]
    assert sum(hits) == 64 and sum(hits[-32:]) >= 24 and sum(hits[:200]) == 0


@pytest.mark.parametrize("ticks_between", [0.5, *nightly(4.0)])
def test_conversations_on_four_replicas(ticks_between: float) -> None:
    """They keep their hits, and the replicas compute about equally much."""
    single, several = Replicas(1, 4000, 1024), Replicas(4, 1000, 256)
    try:
        for one in (single, several):
            one.run(conversations(1, 160, 8, ticks_between))
        assert single.hit_tokens > 0.7 * single.prompt_tokens
        assert several.hit_tokens >= 0.97 * single.hit_tokens
        computed = np.array(several.computed)
        assert abs(computed / computed.mean() - 1).max() < 0.1
    finally:
        single.shutdown()
        several.shutdown()
