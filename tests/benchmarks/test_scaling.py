# SPDX-License-Identifier: Apache-2.0
"""`vllm bench scaling`: around engines that answer at once, and around real ones of two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model
from vllm.benchmarks import scaling
from vllm.benchmarks.scaling import Figures, ScalingArgs, compare
from vllm.entrypoints.cli.main import main
from vllm.v1.core.decode_cost import speed_of_device
from vllm.v1.core.layout_cost import Layout

SMALL = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets a default for processes it starts, which must not last."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")


class FakeLLM:
    """Keeps what it is asked."""

    def __init__(self, namespace: Any, log: list[Any]) -> None:
        self.model_config = SimpleNamespace(max_model_len=256, get_vocab_size=lambda: 50)
        self.sizes = (
            namespace.tensor_parallel_size,
            namespace.pipeline_parallel_size,
            namespace.data_parallel_size,
        )
        assert namespace.enable_prefix_caching is False
        self.log = log
        log.append(("start", self.sizes))

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> None:
        lengths = {len(prompt["prompt_token_ids"]) for prompt in prompts}
        self.log.append((len(prompts), *lengths, params.max_tokens))

    def shutdown(self) -> None:
        self.log.append(("stop", self.sizes))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(scaling, "make_llm", lambda namespace: FakeLLM(namespace, found))
    return found


def test_one_engine_after_the_other(
    log: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--layouts", "tp1,tp2,pp2dp2", "--batch-size", "6", "--input-len", "5"]
    flags += ["--output-len", "7", "--num-iters", "2", "--num-iters-warmup", "1", *SMALL]
    flags += ["--decode-device", "H200", "--output-json", str(tmp_path / "r.json")]
    assert main(["bench", "scaling", str(tiny_model("llama")), *flags]) == 0
    each = [(6, 5, 7)] * 3 + [(1, 5, 7)] * 3 + [(6, 5, 1)] * 3
    sizes = [(1, 1, 1), (2, 1, 1), (1, 2, 2)]
    assert log == [entry for size in sizes for entry in (("start", size), *each, ("stop", size))]
    shown = capsys.readouterr()
    assert "Predicted decode steps and prefills, without drafts" in shown.out
    assert "for the H200 (4.8 TB/s" in shown.out and "and NVLink4 (450 GB/s" in shown.out
    assert "pp2dp2: prefill" in shown.err and "30/30" in shown.err
    result = json.loads((tmp_path / "r.json").read_text())
    assert [one["layout"] for one in result["layouts"]] == ["tp1", "tp2", "pp2dp2"]
    first, second, last = result["layouts"]
    assert (first["devices"], last["devices"]) == (1, 4)
    assert first["batch"]["ratio"] == first["request"]["predicted_ratio"] == 1
    assert len(second["batch"]["seconds"]) == len(second["request"]["seconds"]) == 2
    # Sums of so small a model cost more than they save.
    assert 0 < second["request"]["predicted_ratio"] < 1
    assert second["prefill"]["tokens_per_s"] == pytest.approx(
        6 * 5 / (sum(second["prefill"]["seconds"]) / 2)
    )
    assert last["prefill"]["predicted_ratio"] > 1
    assert result["batch_size"] == 6 and result["output_len"] == 7


def test_nothing_is_predicted_for_unknown_devices(
    log: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU may be a known one")
    flags = ["--layouts", "tp1,dp2", "--num-iters", "1", "--output-len", "4", *SMALL]
    file = tmp_path / "r.json"
    assert (
        main(["bench", "scaling", str(tiny_model("llama")), *flags, "--output-json", str(file)])
        == 0
    )
    assert "Nothing is predicted: " in capsys.readouterr().out
    assert json.loads(file.read_text())["layouts"][1]["batch"]["predicted_ratio"] is None


def test_ratios_are_those_of_medians() -> None:
    args = ScalingArgs(batch_size=4, output_len=10, input_len=20)
    measured = [Figures([2.0, 1.0, 9.0], [1.0], [8.0]), Figures([0.5, 1.0, 1.5], [4.0], [2.0])]
    guesses = [Figures([100.0], [10.0], [30.0]), Figures([300.0], [5.0], [45.0])]
    first, second = compare(args, [Layout(), Layout(tp=2)], measured, guesses)
    assert first.batch.tokens_per_s == 20 and second.batch.tokens_per_s == 40
    assert (second.batch.ratio, second.batch.predicted_ratio) == (2, 3)
    assert (second.request.ratio, second.request.predicted_ratio) == (0.25, 0.5)
    assert first.request.predicted_tokens_per_s == 10
    assert (first.prefill.tokens_per_s, second.prefill.tokens_per_s) == (10, 40)
    assert (second.prefill.ratio, second.prefill.predicted_ratio) == (4, 1.5)


def test_engines_are_stopped_after_an_error(
    log: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: FakeLLM, *args: Any, **options: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(FakeLLM, "generate", fail)
    flags = ["--layouts", "dp2,tp1", *SMALL]
    assert main(["bench", "scaling", str(tiny_model("llama")), *flags]) == 1
    assert "RuntimeError: lost" in capsys.readouterr().err
    assert log == [("start", (1, 1, 2)), ("stop", (1, 1, 2))]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layouts", "tp1,xp2"], "layout 'xp2': expected sizes such as tp2"),
        (["--layouts", "tp3"], "layout tp3: "),
        (["--layouts", "pp9"], "layout pp9: --pipeline-parallel-size 9: the model has 4 layers"),
        (["--layouts", "tp1", "-tp", "2"], "are given with --layouts"),
        (["--layouts", "dp2", "--data-parallel-rank", "0"], "leave out --data-parallel-rank"),
        (["--layouts", "dp2", "-dpr", "0", "-dpl", "1"], "leave out --data-parallel-size-local"),
        (["--layouts", "tp2", "--nnodes", "2"], "layouts of one host are measured"),
        (["--layouts", "tp2", "--enable-eplb"], "--enable-eplb moves experts"),
        (["--output-json", "/nowhere/x.json"], "--output-json /nowhere/x.json: no folder /nowhere"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: no folder /nowhere"),
        (["--decode-device", "1e12,1e15"], "--decode-link"),
        (["--layouts", "tp1", "--input-len", "300"], "exceed --max-model-len 256"),
    ],
)
def test_mistakes_are_found_before_a_run(
    log: list[Any], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", str(tiny_model("llama")), *SMALL, *flags]) == 1
    assert message in capsys.readouterr().err
    assert log == []


def test_flags_that_the_layout_allows(log: list[Any]) -> None:
    """The configuration is that of the first layout: a single device has no experts to move."""
    flags = ["--layouts", "tp2ep,tp4ep", "--enable-eplb", *SMALL]
    assert main(["bench", "scaling", str(tiny_model("qwen3_5_moe")), *flags]) == 0
    assert log[0] == ("start", (2, 1, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks on the CPU")
@pytest.mark.usefixtures("forking")
def test_two_ranks_beside_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture, file = tmp_path / "r.png", tmp_path / "r.json"
    flags = ["--layouts", "tp1,tp2", "--batch-size", "2", "--input-len", "8", "--output-len", "4"]
    flags += ["--num-iters", "1", "--num-iters-warmup", "0", "--decode-device", "H200", *SMALL]
    flags += ["--plot", str(picture), "--output-json", str(file)]
    assert main(["bench", "scaling", str(tiny_model("llama")), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("  layout"))
    assert [line.split()[:2] for line in lines[head + 1 : head + 3]] == [["tp1", "1"], ["tp2", "2"]]
    runs = json.loads(file.read_text())["layouts"]
    assert all(one[what]["tokens_per_s"] > 0 for one in runs for what in ("batch", "request"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is recognised, if its data sheet is known."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    file, size = tmp_path / "r.json", ["--batch-size", "4", "--input-len", "8"]
    flags = ["--layouts", "tp1,dp2,pp2", *size, "--output-len", "8", "--num-iters", "1"]
    flags += ["--output-json", str(file), *SMALL]
    assert main(["bench", "scaling", str(tiny_model("llama")), *flags]) == 0
    result = json.loads(file.read_text())
    assert [one["devices"] for one in result["layouts"]] == [1, 2, 2]
    known = speed_of_device(torch.cuda.get_device_name()) is not None
    predicted = [one["batch"]["predicted_ratio"] for one in result["layouts"]]
    assert (None not in predicted) == known
    assert all(one["request"]["tokens_per_s"] > 0 for one in result["layouts"])
