# SPDX-License-Identifier: Apache-2.0
"""Steps of every model, mixer and drafter of the tree replay as they run; planted hazards are found
in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from apriel2_models import MAMBA, MIXERS, make_tensors, pattern, save
from dflash_models import Block, write_dflash
from draft_models import TINY, mtp_tensors, with_mtp, write_eagle3
from tiny_models import tiny_model

from tests.compilation.graph_safety.samples.replayed_steps import BRANCH, PLANTS, Plant
from tests.nightly import nightly
from vllm.compilation.graph_safety.simulator import models
from vllm.compilation.graph_safety.simulator.driver import VARIED, Driver
from vllm.compilation.graph_safety.simulator.models import (
    StepsReport,
    check_runner,
    check_steps,
    size_problems,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.structured_output.masks import MaskQueue
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import StepGraphs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="runs the CPU's kernels"),
]

#: a prefill, a decode, both, a decode
STEPS = 4
#: enough for every width of three, whole and beside a prefill
MORE_STEPS = 8
LAYOUTS = {"mixers": ["attention", "gdn", "kda", "sliding_window"], "mambas": [*MAMBA]}
#: they run the same layers as other families
ALIKE = ("llama3_rope", "qwen3", "qwen3_5_tied", "qwen3_5_wide", "granite_h_dense")
FAMILIES = [family for family in tiny_models.FAMILIES if family not in ALIKE]


def settings(model: Path, method: dict[str, Any] | None = None, **more: Any) -> VllmConfig:
    given: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "speculative_config": method,
    }
    return EngineArgs(model=str(model), **(given | more)).create_engine_config()


def assert_replays(config: VllmConfig, steps: int = STEPS) -> StepsReport:
    report = check_steps(config, steps)
    assert report.findings == ()
    assert {"decodes", "pieces"} <= {name.split()[0] for name in report.replays}
    # The first step has more tokens than the largest graph, or as many.
    assert steps - 1 <= sum(n for name, n in report.replays.items() if "drafts" not in name)
    return report


@pytest.mark.parametrize("family", [*FAMILIES, *nightly(*ALIKE)])
def test_families(family: str) -> None:
    assert_replays(settings(tiny_model(family)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixers(layout: str, tmp_path: Path) -> None:
    decoder = pattern(LAYOUTS[layout], MIXERS | MAMBA)
    assert_replays(settings(save(tmp_path, decoder, make_tensors(decoder))))


def _mtp(path: Path) -> tuple[Path, dict[str, Any]]:
    return with_mtp(tiny_model("qwen3_5"), path, mtp_tensors(TINY)), {"method": "mtp"}


def _eagle3(path: Path) -> tuple[Path, dict[str, Any]]:
    target = tiny_model("llama")
    return target, {"method": "eagle3", "model": str(write_eagle3(path, target, TINY))}


def _draft_model(path: Path) -> tuple[Path, dict[str, Any]]:
    return tiny_model("qwen3_5"), {"method": "draft_model", "model": str(tiny_model("llama"))}


def _ngram(path: Path) -> tuple[Path, dict[str, Any]]:
    return tiny_model("llama"), {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def _replay(path: Path) -> tuple[Path, dict[str, Any]]:
    return tiny_model("qwen3_5"), {"method": "replay", "acceptance": 0.6, "seed": 1}


def _dflash(path: Path) -> tuple[Path, dict[str, Any]]:
    target = tiny_model("qwen3")
    return target, {"method": "dflash", "model": str(write_dflash(path, target, TINY, Block()))}


DRAFTERS = (_mtp, _eagle3, _dflash, _draft_model, _ngram, _replay)


@pytest.mark.parametrize("made", DRAFTERS)
def test_drafters(made: Callable[[Path], tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    target, method = made(tmp_path / "draft")
    config = settings(target, method | {"num_speculative_tokens": 3})
    report = assert_replays(config, MORE_STEPS)
    for width in (1, 2, 4):
        for kind in (f"decodes of {width} tokens", f"pieces beside decodes of {width} tokens"):
            assert any(name.startswith(kind) for name in report.replays)
    has_layers = made in (_mtp, _eagle3, _dflash, _draft_model)
    assert has_layers == any(name.startswith("drafts") for name in report.replays)


@pytest.mark.parametrize("made", [_mtp, _eagle3])
def test_padding_leaves_anything_in_what_nobody_reads(
    made: Callable[[Path], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """In as many steps as the command runs: rows of padding leave other numbers in a head's memory
    than in the launches that a replay is compared with."""
    target, method = made(tmp_path / "draft")
    assert_replays(settings(target, method | {"num_speculative_tokens": 3}), 64)


def test_hidden_states(tmp_path: Path) -> None:
    extraction = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    config = settings(tiny_model("qwen3_5"), extraction, kv_transfer_config=transfer)
    assert_replays(config)


def test_requests_sample_in_many_ways(runner: ModelRunner) -> None:
    seen: list[SamplingParams] = []

    def launch(output: SchedulerOutput) -> None:
        seen.extend(request.sampling_params for request in output.scheduled_new_reqs)
        runner.execute_dummy(output)

    runner.graphs = StepGraphs()
    driver = Driver(runner, launch=launch, sampling=VARIED)
    for _ in range(14):
        driver.step()
    assert seen == [*VARIED, *VARIED][: len(seen)] and len(seen) >= len(VARIED)
    driver.restart()


def test_some_requests_are_constrained() -> None:
    """They take no token that the masks bar."""
    config, masks = with_own_layers(settings(tiny_model("llama"))), MaskQueue()
    with torch.no_grad(), set_current_vllm_config(config):
        runner = ModelRunner(config, torch.device("cpu"), masks.receive)
        runner.build_model()
        runner.load_weights()
        seen: list[int] = []

        def launch(output: SchedulerOutput) -> None:
            runner.execute_dummy(output)
            rows = [runner.batch.requests[name].row for name in output.masked_req_ids]
            seen.extend(runner.inputs.progress.tokens[rows, 0].tolist())

        driver = Driver(runner, launch=launch, masks=masks)
        for _ in range(12):
            driver.step()
    assert len(seen) > 3 and not any(token % 2 for token in seen)


# ---- planted hazards -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    config = with_own_layers(settings(tiny_model("llama")))
    with torch.no_grad(), set_current_vllm_config(config):
        runner = ModelRunner(config, torch.device("cpu"))
        runner.build_model()
        runner.load_weights()
        yield runner


@pytest.mark.parametrize("plant", [*PLANTS, BRANCH], ids=lambda plant: plant.apply.__name__)
def test_planted_hazards(runner: ModelRunner, plant: Plant) -> None:
    with plant.apply(runner) as between:
        report = check_runner(runner, plant.steps, between)
    assert {(f.path, f.line, f.hazard) for f in report.findings} == {plant.place}, report.findings
    assert any(plant.message in finding.message for finding in report.findings)


def test_nothing_stays_planted(runner: ModelRunner) -> None:
    assert check_runner(runner, 3).findings == ()


def test_steps_without_graphs_are_another_run(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a GPU's own check leaves to the launches that are padded alike."""
    monkeypatch.setattr(models, "first_other", lambda *runs: "step 1 has other tokens")
    (found,) = check_runner(runner, 2).findings
    assert (found.hazard, found.message) == (22, "step 1 has other tokens than without graphs")
    assert check_runner(runner, 2, without_graphs=False).findings == ()


_PLANNED = "return GraphPlan(sizes"


@pytest.mark.parametrize(
    ("plan", "message", "text"),
    [
        (GraphPlan([1, 5], []), "5 decodes is planned for 4 batch rows", _PLANNED),
        (GraphPlan([1, 99], []), "99 decodes is planned, the state memory holds", _PLANNED),
        (GraphPlan([4], [128]), "128 tokens is planned, steps have 64", _PLANNED),
        (GraphPlan([4], [], widths=(1, 17)), "68 tokens is planned, steps have 64", _PLANNED),
        (GraphPlan([4], [128]), "has 64 slots, a graph has 128 tokens", "self.slots = "),
        (GraphPlan([5], []), "has block tables of 4 rows for 5 decodes", "self.table = "),
    ],
)
def test_sizes_that_do_not_fit(
    runner: ModelRunner, plan: GraphPlan, message: str, text: str
) -> None:
    """Each is said where the plan is made, or the buffer that is too small for it."""
    Driver(runner)
    problems = size_problems(runner, plan)
    assert {problem.hazard for problem in problems} == {16}
    (found,) = (problem for problem in problems if message in problem.message)
    finding = found.spot.finding(16, message)
    lines = Path(finding.path).read_text().splitlines()
    assert text in lines[finding.line - 1]
    assert size_problems(runner, GraphPlan([1, 4], [64])) == []
