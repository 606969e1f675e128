# SPDX-License-Identifier: Apache-2.0
"""`--ready-in`: which captures come before the engine is ready, and when the others are made."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm import decisions
from vllm.config.compilation import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils import startup_phases
from vllm.v1.engine import late_captures
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_messages import CoreAddresses
from vllm.v1.engine.core_proc import EngineCoreProc
from vllm.v1.engine.late_captures import LateCaptures
from vllm.v1.worker import warm_up
from vllm.v1.worker.warm_up import capture_until


class Graphs:
    """Counts captures."""

    def __init__(self, num_pending: int) -> None:
        self.num_pending = num_pending

    def capture_next(self) -> bool:
        if not self.num_pending:
            return False
        self.num_pending -= 1
        return True

    def capture_all(self) -> None:
        self.num_pending = 0


class Workers:
    """An executor of two workers, one of which has a size less to capture."""

    def __init__(self, num_pending: int) -> None:
        self.graphs = [Graphs(num_pending), Graphs(num_pending - 1)]

    def collective_rpc(self, method: str) -> list[int]:
        assert method in ("num_pending_graphs", "capture_next_graph")
        if method == "capture_next_graph":
            for graphs in self.graphs:
                graphs.capture_next()
        return [graphs.num_pending for graphs in self.graphs]


def made(workers: Any, ready_by_s: float | None = 0.0) -> LateCaptures:
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(ready_by_s=ready_by_s))
    return LateCaptures(config, workers)


def test_without_a_deadline_everything_is_captured_before() -> None:
    graphs = Graphs(3)
    capture_until(graphs, None)  # type: ignore[arg-type]
    assert graphs.num_pending == 0
    executor: Any = None  # is not even asked
    assert not made(executor, ready_by_s=None).pending


def test_captures_stop_at_the_deadline_and_the_rest_is_a_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions.clear()
    graphs = Graphs(1000)
    # Each capture takes a second.
    clock = SimpleNamespace(monotonic=lambda: 1000.0 - graphs.num_pending)
    monkeypatch.setattr(warm_up, "time", clock)
    capture_until(graphs, 9.5)  # type: ignore[arg-type]
    assert graphs.num_pending == 990
    [one] = decisions.decisions()
    assert one.chosen == f"{graphs.num_pending} sizes after the start" and "--ready-in" in one.why
    decisions.clear()
    graphs.num_pending = 3
    capture_until(graphs, 1001.0)  # type: ignore[arg-type]
    assert graphs.num_pending == 0 and not decisions.decisions()


def test_every_worker_is_brought_to_the_end() -> None:
    workers = Workers(2)
    captures = made(workers)
    captures.capture_one()
    assert captures.pending and [g.num_pending for g in workers.graphs] == [1, 0]
    captures.capture_one()
    assert not captures.pending


def test_under_load_captures_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(late_captures.time, "monotonic", lambda: clock.now)
    workers = Workers(3)
    captures = made(workers)
    left = []
    for _ in range(25):
        clock.now += 0.1
        if captures.is_due:
            captures.capture_one()
        left.append(workers.graphs[0].num_pending)
    assert left[8] == 3 and left[11] == 2 and left[-1] == 1


def test_the_loop_captures_while_it_has_nothing_to_do(tmp_path: Any) -> None:
    """A request that arrives is taken before the next capture."""
    workers = Workers(1000)
    events: list[str] = []

    class IdleCore:
        only_waits = False
        joint = None
        late_captures = made(workers)
        sleeping = SimpleNamespace(is_sleeping=False)
        executor = SimpleNamespace(register_failure_callback=lambda callback: None)

        def has_work(self) -> bool:
            return False

        def use_idle_time(self) -> bool:
            events.append("capture")
            if len(events) == 3:
                proc.request_shutdown()
            core: Any = self
            return EngineCore.use_idle_time(core)

        def abort_requests(self, request_ids: None) -> None:
            events.append("abort")

    addresses = CoreAddresses(f"ipc://{tmp_path}/requests", f"ipc://{tmp_path}/outputs")
    core: Any = IdleCore()
    proc = EngineCoreProc(core, addresses)
    proc.run()
    assert events == ["capture"] * 3 + ["abort"] and workers.graphs[0].num_pending == 997
    core.sleeping.is_sleeping = True
    assert not EngineCore.use_idle_time(core), "graphs of a sleeping engine are gone"


def test_the_deadline_counts_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny_models import tiny_model

    startup_phases.take_events()
    began = time.monotonic() - 5
    startup_phases.begin("import", began)
    arguments = EngineArgs(model=str(tiny_model("llama")), ready_in=7.5, max_model_len=64)
    config = arguments.create_engine_config()
    startup_phases.take_events()
    assert config.compilation_config.ready_by_s == pytest.approx(began + 7.5)
    with pytest.raises(VLLMValidationError, match="--ready-in.*greater than or equal to 0"):
        CompilationConfig(ready_in=-1.0)
