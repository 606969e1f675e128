# SPDX-License-Identifier: Apache-2.0
"""A replica that shares experts and stops, dies, hangs or never starts ends the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from expert_replicas import Traffic, forked_replicas
from parity_checks import on_cpus, prompts

from vllm import LLM
from vllm.v1.engine import core_proc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    on_cpus,
]


@pytest.fixture
def engine() -> Iterator[Callable[..., LLM]]:
    with forked_replicas() as make:
        yield make


def test_a_replica_that_cannot_start_ends_the_start(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the first one waits for it."""
    load_model = Worker.load_model

    def fail(worker: Worker) -> None:
        if worker.parallel_config.data_parallel_rank == 1:
            raise RuntimeError("the checkpoint is gone")
        load_model(worker)

    monkeypatch.setattr(Worker, "load_model", fail)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the checkpoint is gone"):
        engine("mixtral")
    assert time.monotonic() - began < 60


def test_a_stop_amid_requests_is_clean(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that hears of it first joins the other one's steps until that has, too."""
    monkeypatch.setattr(core_proc, "_DRAIN_S", 60.0)
    llm = engine("mixtral")
    traffic = Traffic(llm)
    traffic.add(0, prompts((40,))[0], 400)
    traffic.add(1, prompts((30,))[0], 400)
    traffic.run(10)
    links = llm.llm_engine.engine_core.links
    links[0].begin_close()
    traffic.run(10)
    began = time.monotonic()
    llm.llm_engine.engine_core.shutdown()
    assert time.monotonic() - began < 10, "nobody waits for a replica that has left"
    assert [link.core.process.exitcode for link in links] == [0, 0]


def test_a_killed_replica_ends_all(engine: Callable[..., LLM]) -> None:
    llm = engine("mixtral")
    traffic = Traffic(llm)
    for rank in (0, 1):
        traffic.add(rank, prompts((40,))[0], 400)
    traffic.run(5)
    (_, pid) = llm.collective_rpc(lambda worker: os.getpid())
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"replica 1( ended|: its process ended)"):
        traffic.run()
    assert time.monotonic() - began < 20


def test_a_replica_that_hangs_is_named(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "2")
    llm = engine("mixtral")
    traffic = Traffic(llm)
    traffic.add(0, prompts((40,))[0], 400)
    traffic.run(5)
    (_, pid) = llm.collective_rpc(lambda worker: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineDeadError, match="replica 1 did not (come|answer)"):
            traffic.run()
    finally:
        os.kill(pid, signal.SIGCONT)
