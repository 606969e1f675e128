# SPDX-License-Identifier: Apache-2.0
"""`vllm graph-check`: table, JSON, SARIF and exit status; and the helper for authors' tests."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from vllm.compilation.graph_safety import model_steps
from vllm.compilation.graph_safety.device.checks import DevicesReport
from vllm.compilation.graph_safety.hazards import HAZARDS
from vllm.compilation.graph_safety.model_steps import smaller_model
from vllm.compilation.graph_safety.report import CHECKS_LEFT, CHECKS_RUN, Report, join_report
from vllm.compilation.graph_safety.simulator.models import StepsReport
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_outline import outline_model
from vllm.platforms import current_platform

pytest_plugins = ["vllm.testing.graph_safety"]
ROOT = Path(__file__).parents[3]
SAMPLES = Path(__file__).parent / "samples"
SAMPLE = SAMPLES / "upstream_style.py"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets a default for processes it starts, which must not last."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")


def test_hazards_with_place_and_replacement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, sarif = tmp_path / "out.json", tmp_path / "out.sarif"
    argv = ["graph-check", str(SAMPLE), "--json", str(out), "--sarif", str(sarif)]
    assert main(argv) == 1
    table = capsys.readouterr().out
    line = next(i for i, t in enumerate(SAMPLE.read_text().splitlines(), 1) if "bincount" in t)
    assert f"upstream_style.py:{line}:" in table and "#2 a shape depends on data" in table
    assert f"instead: {HAZARDS[2].replacement}" in table
    assert CHECKS_RUN in table and CHECKS_LEFT in table
    _check_json(json.loads(out.read_text()), line)
    _check_sarif(json.loads(sarif.read_text()), line)


def _check_json(report: dict[str, Any], line: int) -> None:
    (target,) = report["targets"]
    (found,) = (f for f in target["findings"] if f["line"] == line)
    assert (found["hazard"], found["replacement"]) == (2, HAZARDS[2].replacement)
    assert found["file"].endswith("upstream_style.py") and found["where"] == "inside a graph"
    assert found["function"].endswith("SparseMoe.forward")
    assert found["code"].startswith("torch.bincount(")


def _check_sarif(log: dict[str, Any], line: int) -> None:
    (run,) = log["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert log["version"] == "2.1.0" and {r["ruleId"] for r in run["results"]} <= rules
    (result,) = (r for r in run["results"] if _region(r)["startLine"] == line)
    assert result["ruleId"] == "graph-2" and _region(result)["startColumn"] == 18
    assert HAZARDS[2].replacement in result["message"]["text"]


def _region(result: dict[str, Any]) -> dict[str, int]:
    region: dict[str, int] = result["locations"][0]["physicalLocation"]["region"]
    return region


def test_a_clean_model_and_a_clean_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sarif = tmp_path / "out.sarif"
    targets = [str(tiny_model("llama")), str(SAMPLES / "clean.py")]
    assert main(["graph-check", *targets, "--steps", "0", "--sarif", str(sarif)]) == 0
    out = capsys.readouterr().out
    assert out.count("no hazard") == 2 and "steps were not run: --steps 0" in out
    (run,) = json.loads(sarif.read_text())["runs"]
    # What is allowed is shown as suppressed, with the reason.
    assert run["results"]
    assert all(result["suppressions"][0]["justification"] for result in run["results"])


needs_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="runs the CPU's kernels")


@needs_cpu
def test_the_steps_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Beside its source; what they find is in the same report."""
    out = tmp_path / "out.json"
    model = str(tiny_model("llama"))
    assert main(["graph-check", model, "--steps", "4", "--json", str(out)]) == 0
    assert "4 replays in 4 decode, verify and mixed steps" in capsys.readouterr().out
    (target,) = json.loads(out.read_text())["targets"]
    assert len(target["checks_run"]) == 2 and target["checks_left"] == [CHECKS_LEFT]
    captures = {one.pop("name"): one for one in target["captures"]}
    assert "decodes of 1 tokens, batch of 8" in captures
    assert all(one["captured"] and not one["stale"] for one in captures.values())
    assert sum(one["replays"] for one in captures.values()) == 4
    assert {one["max_difference"] for one in captures.values()} == {0.0, None}


def _no_source() -> Report:
    return join_report("m", {})


def _found(*args: object) -> StepsReport:
    finding = Finding(str(SAMPLE), 3, 1, 26, "handed on", "m.f", "self.last = x")
    return StepsReport((finding,), 1, 1, {}, ())


@needs_cpu
def test_steps_in_an_authors_tests(
    assert_steps_replay: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = assert_steps_replay(tiny_model("llama"), steps=2)
    assert "replays in 2 decode" in report.checks[0] and report.left == () and report.captures
    args = EngineArgs(model=str(tiny_model("llama")), hf_overrides={"num_hidden_layers": 1})
    monkeypatch.setattr(model_steps, "check_steps", _found)
    with pytest.raises(AssertionError, match=r"upstream_style\.py:3:1  #26"):
        assert_steps_replay(args)
    monkeypatch.setattr(model_steps, "_MOST_BYTES", 1)
    with pytest.raises(VLLMValidationError, match="GiB of weights"):
        assert_steps_replay(args)


@needs_cpu
def test_findings_of_steps_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_steps, "check_steps", _found)
    sarif = tmp_path / "out.sarif"
    assert main(["graph-check", str(tiny_model("llama")), "--sarif", str(sarif)]) == 1
    table = capsys.readouterr().out
    assert "upstream_style.py:3:1  #26" in table and "handed on (in a replayed step, m.f)" in table
    (run,) = json.loads(sarif.read_text())["runs"]
    (result,) = (r for r in run["results"] if "suppressions" not in r)
    assert result["ruleId"] == "graph-26" and _region(result)["startLine"] == 3


@needs_cpu
def test_flags_that_steps_do_not_have_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[VllmConfig] = []

    def check(config: VllmConfig, *rest: object) -> StepsReport:
        given.append(config)
        return _found()

    monkeypatch.setattr(model_steps, "check_steps", check)
    model = str(tiny_model("llama"))
    args = EngineArgs(model=model, max_num_seqs=256, max_model_len=128, data_parallel_size=2)
    (*_, said) = model_steps.with_steps(_no_source, args, 4).checks
    assert said.endswith(
        "; the steps had --data-parallel-size 1 in place of 2, --max-num-seqs 8 in place of 256"
    )
    assert given[0].scheduler_config.max_num_seqs == 8
    (*_, said) = model_steps.with_steps(_no_source, EngineArgs(model=model), 4).checks
    assert "in place of" not in said


class Gpu:
    def is_cuda(self) -> bool:
        return True


@needs_cpu
def test_a_gpu_captures_the_sizes_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its steps, which are small."""
    given: list[VllmConfig] = []

    def check(config: VllmConfig, steps: int, progress: object, own: VllmConfig) -> DevicesReport:
        given[:] = config, own
        return DevicesReport((), 1, 512, ("captured",))

    monkeypatch.setattr(model_steps, "current_platform", Gpu())
    monkeypatch.setattr(model_steps, "check_devices", check)
    monkeypatch.setattr(type(current_platform), "supports_graphs", True)
    args = EngineArgs(
        model=str(tiny_model("llama")),
        max_num_seqs=100,
        max_num_batched_tokens=2000,
        max_model_len=1000,
        cudagraph_capture_sizes=[4, 100, 1000],
    )
    report = model_steps.with_steps(_no_source, args, 4)
    assert report.left == () and report.checks[-1].startswith(
        "on 1 GPU(s): captured; the steps had"
    )
    small, own = given
    assert (small.scheduler_config.max_num_seqs, own.scheduler_config.max_num_seqs) == (8, 100)
    assert own.scheduler_config.max_num_batched_tokens == 2000
    assert own.compilation_config.decode_capture_sizes == [4, 100]
    assert small.compilation_config.decode_capture_sizes[-1] == 8
    assert "capture" not in report.checks[-1].partition("the steps had")[2]
    assert own.load_config.load_format == small.load_config.load_format == "dummy"


@needs_cpu
def test_a_gpu_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> DevicesReport:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_steps, "current_platform", Gpu())
    monkeypatch.setattr(model_steps, "check_devices", fails)
    args = EngineArgs(model=str(tiny_model("llama")))
    report = model_steps.with_steps(_no_source, args, 4)
    assert report.left[0] == "steps were not run: CUDA out of memory"


@needs_cpu
def test_weights_that_are_too_large_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_steps, "_MOST_BYTES", 1)
    args = EngineArgs(model=str(tiny_model("llama")))
    report = model_steps.with_steps(_no_source, args, 4)
    assert report.is_clean and report.left[0].startswith("steps were not run: 0.0 GiB of weights")
    assert report.checks == (CHECKS_RUN,)


@needs_cpu
def test_a_smaller_copy_of_a_large_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model=str(tiny_model("qwen3_5")), hf_overrides={"intermediate_size": 96})
    config = args.create_engine_config()
    assert smaller_model(config) is None, "the tiny model is small already"
    monkeypatch.setattr(model_steps, "_WIDTHS", {"vocab_size": 64})
    monkeypatch.setattr(model_steps, "_HIDDEN", 32)
    whole = replace(args, dtype="float32", max_model_len=128).create_engine_config()
    monkeypatch.setattr(model_steps, "_MOST_BYTES", outline_model(whole).weight_bytes - 1)
    report = model_steps.with_steps(_no_source, args, 4)
    assert report.is_clean and "replays in 4 decode" in report.checks[-1]
    assert report.checks[-1].endswith(
        "of a smaller copy: vocab_size 64 of 260, hidden_size 32 of 64"
    )
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}
    drafting = replace(args, speculative_config=drafts)
    report = model_steps.with_steps(_no_source, drafting, 4)
    assert report.left[0].startswith("steps were not run: 0.0 GiB of weights")


@pytest.mark.parametrize(("layers", "needed"), [(32, 4), (3, None)])
def test_a_copy_has_every_kind_of_layer(layers: int, needed: int | None) -> None:
    model = str(ROOT / "benchmarks" / "qwen3_5_4b")
    args = EngineArgs(model=model, hf_overrides={"num_hidden_layers": layers})
    copy = smaller_model(args.create_engine_config())
    assert copy is not None and copy.overrides.get("num_hidden_layers") == (needed or 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent.py"], "there is no file absent.py"),
        (["x.py", "--model", "m"], "not as --model"),
        (["m", "--steps", "-1"], "--steps -1: give 0 or more"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["graph-check", *argv]) == 1
    assert message in capsys.readouterr().err


def test_triton_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["graph-check", str(SAMPLE)]) == 1
    assert "install triton" in capsys.readouterr().err


class Safe(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


class Unsafe(Safe):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.max().item()


def largest(x: Tensor) -> float:
    return float(x.max())


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("target", [Safe, Safe(2), doubled, nn.Sequential(Safe(1))])
def test_safe_targets(target: object, assert_graph_safe: Callable[[object], Report]) -> None:
    assert assert_graph_safe(target).functions


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (Unsafe, ".item()"),
        (Unsafe(2), ".item()"),
        (nn.Sequential(Safe(1), nn.Sequential(Unsafe(1))), ".item()"),
        (largest, "float(x.max())"),
    ],
)
def test_unsafe_targets_are_named_with_their_line(
    target: object, line: str, assert_graph_safe: Callable[[object], Report]
) -> None:
    with pytest.raises(AssertionError, match=r"test_command\.py:\d+:\d+  #1 ") as error:
        assert_graph_safe(target)
    assert line in str(error.value) and HAZARDS[1].replacement in str(error.value)


def test_a_hazard_below_a_built_module_is_found(
    assert_graph_safe: Callable[[object], Report],
) -> None:
    """Submodules are the real ones: the class alone does not say which they are."""
    model = Safe(1)
    model.inner = nn.Sequential(nn.Linear(4, 4), Unsafe(1))  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="#1 "):
        assert_graph_safe(model)


def test_what_is_no_target(assert_graph_safe: Callable[[object], Report]) -> None:
    with pytest.raises(VLLMValidationError, match="neither a module"):
        assert_graph_safe(torch.zeros(1))
    with pytest.raises(VLLMValidationError, match="has no forward"):
        assert_graph_safe(nn.Module)
