# SPDX-License-Identifier: Apache-2.0
"""What every connector has to bear; each check raises `ContractViolation` or returns."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.testing.connectors.case import DAMAGES, ConnectorCase, ContractViolation
from vllm.testing.connectors.engine import SimulatedEngine, expected_output
from vllm.v1.engine import FinishReason

Check = Callable[[ConnectorCase, str, Path], None]

#: steps after which something happens to running requests
_POINTS = range(9)
#: within which a connector that was shut down closes its files and ends its threads
_CLOSE_S = 5.0


def prompt(seed: int, length: int, shared: int = 32) -> list[int]:
    """Prompts of one length that begin alike and go on differently."""
    generator = random.Random(seed)
    return [*range(7, 7 + min(shared, length)), *(generator.randrange(250) for _ in range(length))][
        :length
    ]


PROMPTS = [prompt(seed, length) for seed, length in enumerate((70, 33, 100, 17))]


def check_exact_bits(case: ConnectorCase, kind: str, directory: Path) -> None:
    """Prompts and the next turns of their conversations, on the device and after it was evicted."""
    with running(case, kind, directory) as engine:
        for _ in range(2):
            _generate(engine, _next_turns(PROMPTS, _generate(engine, PROMPTS)))
            engine.evict_device()
        if case.loads:
            _expect_loads(engine)


def _expect_loads(engine: SimulatedEngine) -> None:
    """Of a conversation that was evicted, the first prompt or else the next turn is found."""
    turn = PROMPTS[2]
    for _ in range(2):
        name = engine.add(turn)
        engine.settle()
        if engine.outputs[name].num_cached_tokens:
            return
        [turn] = _next_turns([turn], [engine.tokens[name]])
        engine.evict_device()
    lengths = f"a prompt of {len(PROMPTS[2])} tokens, nor its next turn"
    aim = "--kv-connector-stores-only (loads=False) is for connectors that bring nothing back"
    raise ContractViolation("nothing-loaded", f"{lengths}; {aim}")


def check_one_group(case: ConnectorCase, kind: str, directory: Path) -> None:
    """The same with the hybrid allocator switched off, where a model has several groups with it and
    one without."""
    if kind == "window":
        options = {**case.options, "disable_hybrid_kv_cache_manager": True}
        check_exact_bits(replace(case, options=options), kind, directory)


def check_preemption(case: ConnectorCase, kind: str, directory: Path) -> None:
    """A running request loses its blocks, at every point of its life."""
    with running(case, kind, directory) as engine:
        for point in _POINTS:
            names = [engine.add(p) for p in PROMPTS[:2]]
            for _ in range(point):
                engine.step()
            engine.preempt()
            engine.settle()
            _expect(engine, names, PROMPTS[:2])
            if point % 2:
                engine.evict_device()


def check_abort(case: ConnectorCase, kind: str, directory: Path) -> None:
    """The client leaves, at every point of a request's life; others go on."""
    with running(case, kind, directory) as engine:
        for point in _POINTS:
            names = [engine.add(p) for p in PROMPTS[:3]]
            for _ in range(point):
                engine.step()
            engine.abort(names[0])
            engine.settle()
            _expect(engine, names[1:], PROMPTS[1:3])
            engine.evict_device()


def check_small_memory(case: ConnectorCase, kind: str, directory: Path) -> None:
    """Blocks are evicted and reused all the time."""
    prompts = [prompt(seed, 60 + 9 * seed) for seed in range(6)]
    with running(case, kind, directory, room=1.5) as engine:
        for _ in range(3):
            _generate(engine, prompts)


def check_late_reports(case: ConnectorCase, kind: str, directory: Path) -> None:
    """Workers' reports take their time and overtake one another."""
    generator = random.Random(5)
    with running(case, kind, directory, report_delay=lambda: generator.randrange(6)) as engine:
        for _ in range(3):
            _generate(engine, PROMPTS)
            engine.evict_device()


def check_recompute(case: ConnectorCase, kind: str, directory: Path) -> None:
    """Whatever happens to stored data, the requests end with the tokens of computing it."""
    for how in DAMAGES:
        with running(case, kind, directory / how) as engine:
            rounds = (PROMPTS, _next_turns(PROMPTS, _generate(engine, PROMPTS)))
            engine.evict_device()
            with _decoding_damage(how):
                for asked in (*rounds, *rounds) if engine.damage(case, how) else rounds:
                    _generate(engine, asked)
                    engine.evict_device()


def check_fail(case: ConnectorCase, kind: str, directory: Path) -> None:
    """With the policy `fail` a request whose data is damaged ends with an error, others do not."""
    for how in DAMAGES:
        with running(case, kind, directory / how, policy="fail") as engine:
            rounds = (PROMPTS, _next_turns(PROMPTS, _generate(engine, PROMPTS)))
            engine.evict_device()
            if not engine.damage(case, how):
                continue
            for asked in rounds:
                with _decoding_damage(how):
                    names = [engine.add(p) for p in asked]
                    engine.evict_device()
                ended = [(n, p) for n, p in zip(names, asked, strict=True)
                         if engine.reason(n) is not FinishReason.ERROR]  # fmt: skip
                _expect(engine, [n for n, _ in ended], [p for _, p in ended])


def check_shutdown(case: ConnectorCase, kind: str, directory: Path) -> None:
    """The engine ends in the middle of things; nothing stays open."""
    # What is made once per process does not count.
    with running(case, kind, directory / "first") as engine:
        _generate(engine, PROMPTS[:1])
    before = _open_things()
    for point in _POINTS:
        engine = SimulatedEngine(case, kind, directory / f"point{point}")
        for p in PROMPTS:
            engine.add(p)
        for _ in range(point):
            engine.step()
        engine.shutdown()
        del engine
    _expect_closed(before)


def check_random_lives(
    case: ConnectorCase, kind: str, directory: Path, runs: int = 20, seed: int = 0
) -> None:
    """Random requests, aborts, preemptions, evictions, damage and late reports, `runs` times: equal
    tokens or one error each, and nothing left."""
    before = None
    for run in range(seed, seed + runs):
        generator = random.Random(run)
        policy = generator.choice(("recompute", "fail"))
        with running(
            case,
            kind,
            directory / f"run{run}",
            policy=policy,
            room=generator.choice((1.5, 3.0, 5.0)),
            report_delay=lambda g=generator: g.choice((0, 0, 0, 1, 4)),
        ) as engine:
            try:
                _random_life(case, engine, generator, policy)
            except ContractViolation as violation:
                raise ContractViolation(violation.name, f"seed {run}: {violation}") from violation
        if before is None:
            before = _open_things()
    if before is not None:
        _expect_closed(before)


def _random_life(
    case: ConnectorCase, engine: SimulatedEngine, generator: random.Random, policy: str
) -> None:
    names: list[str] = []
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    damaged = False
    for _ in range(generator.randrange(20, 60)):
        event = generator.random()
        if event < 0.3 and len(engine.scheduler.requests) < 8:
            tokens = prompt(generator.randrange(6), generator.randrange(2, 110))
            name = engine.add(tokens, generator.randrange(1, 5))
            names.append(name)
            prompts[name] = tokens
        elif event < 0.35 and names:
            name = generator.choice(names)
            if name not in engine.outputs:
                engine.abort(name)
                aborted.add(name)
        elif event < 0.4:
            engine.preempt()
        elif event < 0.43:
            engine.evict_device()
        elif event < 0.45:
            damaged |= engine.damage(case, generator.choice(DAMAGES))
        with _decoding_damage("some") if damaged else nullcontext():
            engine.step()
    with _decoding_damage("some") if damaged else nullcontext():
        engine.settle()
    for name in names:
        may_fail = damaged and policy == "fail" and engine.reason(name) is FinishReason.ERROR
        if name not in aborted and not may_fail:
            _expect(engine, [name], [prompts[name]])


#: name -> check; the order in which they run
CHECKS: dict[str, Check] = {
    "exact-bits": check_exact_bits,
    "one-group": check_one_group,
    "preemption": check_preemption,
    "abort": check_abort,
    "small-memory": check_small_memory,
    "late-reports": check_late_reports,
    "recompute": check_recompute,
    "fail": check_fail,
    "shutdown": check_shutdown,
    "random-lives": check_random_lives,
}


# ---- helpers -----------------------------------------------------------------------------------


@contextmanager
def running(
    case: ConnectorCase, kind: str, directory: Path, **arguments: Any
) -> Iterator[SimulatedEngine]:
    """An engine that has to end with nothing held."""
    engine = SimulatedEngine(case, kind, directory, **arguments)
    try:
        yield engine
        engine.settle()
        engine.check_nothing_left()
    finally:
        engine.shutdown()


def _generate(engine: SimulatedEngine, prompts: Sequence[list[int]]) -> list[list[int]]:
    names = [engine.add(p) for p in prompts]
    engine.settle()
    return _expect(engine, names, prompts)


def _next_turns(turns: Sequence[list[int]], outputs: Sequence[list[int]]) -> list[list[int]]:
    """What clients send after these answers."""
    ends = prompt(9, 12, 0)
    return [[*turn, *tokens, *ends] for turn, tokens in zip(turns, outputs, strict=True)]


def _expect(
    engine: SimulatedEngine, names: Sequence[str], prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Each request ended with the model's tokens; these."""
    for name, tokens in zip(names, prompts, strict=True):
        expected = expected_output(tokens, engine.requests[name].max_tokens)
        if engine.reason(name) is not FinishReason.LENGTH or engine.tokens[name] != expected:
            output = engine.outputs.get(name)
            raise ContractViolation(
                "not-recomputed",
                f"request {name}: {engine.tokens[name]} instead of {expected}, ended with "
                f"{engine.reason(name)}, {None if output is None else output.error}",
            )
    return [engine.tokens[name] for name in names]


@contextmanager
def _decoding_damage(how: str) -> Iterator[None]:
    """Wrong state is damage that was decoded."""
    try:
        yield
    except ContractViolation as violation:
        if violation.name != "wrong-bits":
            raise
        raise ContractViolation("broken-data-decoded", f"{how}: {violation}") from violation


def _open_things() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _expect_closed(before: tuple[int, int]) -> None:
    deadline = time.monotonic() + _CLOSE_S
    while time.monotonic() < deadline:
        descriptors, threads = _open_things()
        if descriptors <= before[0] and threads <= before[1]:
            return
        time.sleep(0.01)
    name = "descriptors-leaked" if descriptors > before[0] else "threads-leaked"
    raise ContractViolation(name, f"{before} before, {(descriptors, threads)} after")
