# SPDX-License-Identifier: Apache-2.0
"""Numbers of the weights that captured steps hold follow the weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compilation.fake_graphs import Tape
from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.model_executor.layers.cache_scales import CacheScales
from vllm.platforms import current_platform
from vllm.v1.worker.graph_set import GraphSet
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay, StepGraphs

SIZES = [1, 2]


def set_scale(checkpoint: Path, k: float) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".k_proj.weight")]:
        tensors[name.removesuffix("weight") + "k_scale"] = torch.tensor(k)
    save_file(tensors, file, metadata={"format": "pt"})


class Steps:
    """Plans steps that write the scale of a layer's keys, as a kernel that gets it as a number."""

    def __init__(self, runner: ModelRunner) -> None:
        self.tape = Tape()
        self.runner = runner
        modules = runner.model.modules()
        self.scales = next(one for one in modules if isinstance(one, CacheScales))

    def plan(self) -> None:
        graphs = GraphSet(SIZES, self.prepare, self.tape.new_graph, split=False)
        graphs_of_step = StepGraphs({1: graphs})
        self.runner.graphs = self.runner.placed[0].graphs = graphs_of_step

    def prepare(self, size: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out, k = torch.zeros(size, 1), self.scales.k
            self.tape.launch(lambda: out.fill_(k))
            return out

        return run

    @torch.inference_mode()
    def replayed(self) -> list[float]:
        return [float(self.runner.graphs.replay(Replay(size, True))[0, 0]) for size in SIZES]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), copy)
    set_scale(copy, 0.5)
    return copy


@pytest.fixture
def llm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", True)
    made = LLM(
        str(checkpoint),
        max_model_len=64,
        kv_cache_memory_bytes=2**20,
        kv_cache_dtype="fp8",
        enable_sleep_mode=True,
    )
    yield made
    made.shutdown()


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Steps:
    (made,) = llm.collective_rpc(lambda worker: Steps(worker.model_runner))
    monkeypatch.setattr(ModelRunner, "plan_graphs", lambda runner: made.plan())
    made.plan()
    return made


def test_other_numbers_are_captured_again(llm: LLM, checkpoint: Path, steps: Steps) -> None:
    steps.runner.graphs.capture_all()
    assert steps.replayed() == [0.5, 0.5]
    set_scale(checkpoint, 4.0)
    llm.collective_rpc("reload_weights")
    assert steps.replayed() == [4.0, 4.0]


def test_the_same_numbers_keep_their_graphs(llm: LLM, steps: Steps) -> None:
    steps.runner.graphs.capture_all()
    kept = steps.runner.graphs
    llm.collective_rpc("reload_weights")
    assert steps.runner.graphs is kept and len(steps.tape.graphs) == len(SIZES)


def test_graphs_of_numbers_that_a_failed_load_left_are_captured_again(
    llm: LLM, checkpoint: Path, steps: Steps
) -> None:
    """It may have changed some layers before it fails."""
    steps.runner.graphs.capture_all()
    set_scale(checkpoint, 4.0)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    last = next(name for name in tensors if name.endswith("layers.1.self_attn.v_proj.weight"))
    tensors[last.removesuffix("weight") + "v_scale"] = torch.tensor(-1.0)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(Exception, match="cache scales must be positive"):
        llm.collective_rpc("reload_weights")
    assert steps.replayed() == [steps.scales.k] * 2 == [4.0, 4.0]


@pytest.mark.parametrize("captured", [0, 1])
def test_what_waited_to_be_captured_is_not_lost(
    captured: int, llm: LLM, checkpoint: Path, steps: Steps
) -> None:
    """`--ready-in` captures between steps."""
    for _ in range(captured):
        steps.runner.graphs.capture_next()
    set_scale(checkpoint, 4.0)
    llm.collective_rpc("reload_weights")
    steps.runner.graphs.capture_all()
    assert steps.replayed() == [4.0, 4.0]


@pytest.mark.parametrize("captured", [0, 1])
def test_neither_is_it_by_a_sleep(captured: int, llm: LLM, checkpoint: Path, steps: Steps) -> None:
    for _ in range(captured):
        steps.runner.graphs.capture_next()
    llm.sleep(2)
    set_scale(checkpoint, 4.0)
    llm.wake_up()
    assert steps.replayed() == [4.0, 4.0]


def test_while_the_memory_sleeps_nothing_is_captured(
    llm: LLM, checkpoint: Path, steps: Steps
) -> None:
    steps.runner.graphs.capture_all()
    llm.sleep(2)
    llm.wake_up(["weights"])
    set_scale(checkpoint, 4.0)
    llm.collective_rpc("reload_weights")
    assert len(steps.tape.graphs) == len(SIZES)
    llm.wake_up(["kv_cache"])
    assert steps.replayed() == [4.0, 4.0]


def test_without_graphs_there_is_nothing_to_capture(llm: LLM, checkpoint: Path) -> None:
    set_scale(checkpoint, 4.0)
    llm.collective_rpc("reload_weights")

    def captured(worker: Any) -> int:
        return worker.model_runner.graphs.num_captured

    assert llm.collective_rpc(captured) == [0]
