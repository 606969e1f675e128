# SPDX-License-Identifier: Apache-2.0
"""Replays of every kind equal the same launches without graphs: outputs and state, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from apriel2_models import MAMBA, MIXERS, make_tensors, pattern, save
from step_driver import MAX_MODEL_LEN, Driver, EagerSteps, Outcome, engine, observed, on_worker

from tests.extraction_options import extraction
from vllm.compilation.piecewise import alias_memory
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay

pytestmark = pytest.mark.gpu


def _steps(runner: ModelRunner) -> None:
    """Prefills alone and together, chunked ones, mixed steps, decodes, padded and not."""
    driver = Driver(runner)
    driver.step({"a": 64}, [])
    driver.step({"b": 37}, ["a"])
    driver.step({"c": 5, "d": 90}, ["a", "b"])
    driver.step({"d": 70}, ["a", "b", "c"])
    for _ in range(6):
        driver.step({}, ["a", "b", "c", "d"])
    driver.end(["b"])
    driver.step({"e": 200, "f": 1}, ["a"])
    driver.step({}, ["c", "a", "d", "e", "f"])
    driver.step({f"g{i}": 60 for i in range(10)}, ["e", "d", "f", "c", "a"])
    driver.step({}, [f"g{i}" for i in range(10)] + ["a"])
    driver.step({f"h{i}": 480 for i in range(5)}, ["a"])
    driver.step({}, ["a", "h0", "h3"])
    driver.close()


def _compare(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, Outcome]:
    captured = runner.graphs
    with observed(runner, monkeypatch) as replayed:
        _steps(runner)
    runner.graphs = EagerSteps(runner, captured)
    with observed(runner, monkeypatch) as eager:
        _steps(runner)
    runner.graphs = captured
    assert replayed.replays == eager.replays
    for ours, theirs in ((replayed.logits, eager.logits), (replayed.hidden, eager.hidden)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"output {i} differs ({replayed.replays})"
    assert replayed.memory is not None and eager.memory is not None
    assert replayed.memory.any() and torch.equal(replayed.memory, eager.memory)
    return replayed, eager


@pytest.mark.parametrize("extracting", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "qwen3_5"])
def test_default_mode(
    family: str, extracting: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = extraction(tmp_path, [0, 2, 4]) if extracting else {}
    with engine(monkeypatch, family, **settings) as llm:
        replayed, _ = on_worker(llm, _compare, monkeypatch)
    assert Replay(64, whole=False) in replayed.replays
    assert Replay(4, whole=True) in replayed.replays
    assert Replay(8, whole=True) in replayed.replays
    assert None in replayed.replays


@pytest.mark.parametrize("names", [[*MIXERS], [*MAMBA]])
def test_mixers_of_apriel2(
    names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prefills in pieces after replays of whole decode steps: neither has the other's baked in."""
    decoder = pattern(names, MIXERS | MAMBA)
    positions = {"embeddings": {"max_position_embeddings": MAX_MODEL_LEN}}
    path = save(tmp_path, decoder, make_tensors(decoder), **positions)
    with engine(monkeypatch, path) as llm:
        replayed, _ = on_worker(llm, _compare, monkeypatch)
    assert Replay(64, whole=False) in replayed.replays
    assert Replay(4, whole=True) in replayed.replays


def test_piecewise_mode_runs_decodes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, "qwen3_5", compilation_config={"cudagraph_mode": "PIECEWISE"}) as llm:
        replayed, _ = on_worker(llm, _compare, monkeypatch)
    assert Replay(8, whole=False) in replayed.replays
    assert not any(replay is not None and replay.whole for replay in replayed.replays)


def test_full_decode_only_runs_other_steps_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    with engine(monkeypatch, "qwen3_5", compilation_config=mode) as llm:
        replayed, _ = on_worker(llm, _compare, monkeypatch)
    assert replayed.replays[:2] == [None, None]
    assert Replay(4, whole=True) in replayed.replays


def test_sizes_captured_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures change neither what requests keep nor what later replays compute."""
    with engine(monkeypatch, "qwen3_5") as llm:
        on_worker(llm, _capture_between_steps, monkeypatch)


def _capture_between_steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    with observed(runner, monkeypatch) as expected:
        _steps(runner)
    runner.plan_graphs()
    step = runner.execute_dummy

    def capture_then_step(output: Any, launches: bool = True) -> None:
        runner.graphs.capture_next()
        step(output, launches)

    with monkeypatch.context() as patch, observed(runner, monkeypatch) as found:
        patch.setattr(runner, "execute_dummy", capture_then_step)
        _steps(runner)
    assert runner.graphs.num_pending and found.replays[0] is None
    assert len(found.replays) == len(expected.replays)
    # Larger captures than necessary serve meanwhile, so only closeness is asked for.
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.1, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_an_alias_is_the_same_memory_and_owns_none(dtype: torch.dtype) -> None:
    base = torch.zeros(8, 40, dtype=dtype, device="cuda")
    view = base[2:6, 8:24]
    alias = alias_memory(view)
    assert alias.data_ptr() == view.data_ptr()
    assert (alias.shape, alias.stride(), alias.dtype) == (view.shape, view.stride(), dtype)
    view.fill_(3)
    assert torch.equal(alias, view) and int(base.sum()) == 3 * view.numel()
    before = torch.cuda.memory_allocated()
    del base, view
    assert torch.cuda.memory_allocated() < before
