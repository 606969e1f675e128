# SPDX-License-Identifier: Apache-2.0
"""`vllm tune`: what is timed, what is kept, and the command around it."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nightly import nightly
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.cli.tune import describe
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.moe import ClampedSwiglu
from vllm.kernels.triton.configs import shipped
from vllm.kernels.triton.tile_files import Configs, Tile, read_tile_file
from vllm.kernels.tuning.shapes import (
    AttentionShape,
    ConvolutionShape,
    DeltaRuleShape,
    ExpertsShape,
)
from vllm.kernels.tuning.spaces import Space, spaces
from vllm.kernels.tuning.sweep import sweep, tile_of, with_tile
from vllm.kernels.tuning.workloads import Run, Workloads

BASE = shipped("NVIDIA H200")
TILES = tuple(Tile(16, columns, 4, 3) for columns in (32, 64, 128))
SPACE = Space("attention_decode", 256, TILES, ())


def short() -> None: ...


def long() -> None: ...


def timer(table: dict[int, tuple[float | None, float | None]], present: float = 10.0) -> Any:
    """Microseconds of the runs `short` and `long` by the tile's columns; others take `present`."""

    def time_us(configs: Configs, run: Run) -> float | None:
        tile = tile_of(configs, SPACE)
        if tile not in TILES:
            return present
        return table[tile.columns][run is long]

    return time_us


def test_the_fastest_over_all_workloads_wins() -> None:
    table = {32: (1.0, 30.0), 64: (8.0, 8.0), 128: (9.0, 9.0)}
    result = sweep(BASE, SPACE, [short, long], timer(table))
    assert result.best == Tile(16, 32, 4, 3) and result.speedup == pytest.approx(100 / 30**0.5 / 10)
    result = sweep(BASE, SPACE, [short, long], timer(table | {32: (1.0, 90.0)}))
    assert result.best == Tile(16, 64, 4, 3) and result.num_timed == 3
    assert result.speedup == pytest.approx(1.25)


def test_what_cannot_be_launched_is_left_out() -> None:
    table = {32: (1.0, None), 64: (None, None), 128: (9.0, 9.0)}
    result = sweep(BASE, SPACE, [short, long], timer(table))
    assert result.best == Tile(16, 128, 4, 3) and result.num_timed == 1


def test_nothing_changes_for_less_than_the_scatter() -> None:
    result = sweep(BASE, SPACE, [short], timer(dict.fromkeys((32, 64, 128), (9.95, 0.0))))
    assert result.best == result.before == tile_of(BASE, SPACE)
    assert "stays" in describe(result)


def test_a_present_tile_that_fails_is_replaced() -> None:
    def failing(configs: Configs, run: Run) -> float | None:
        return 5.0 if tile_of(configs, SPACE) == TILES[1] else None

    result = sweep(BASE, SPACE, [short], failing)
    assert result.best == TILES[1] and math.isinf(result.speedup)
    assert "the old one fails" in describe(result)
    with pytest.raises(RuntimeError, match="attention_decode.256"):
        sweep(BASE, SPACE, [short], lambda configs, run: None)


def test_only_the_tuned_tile_changes() -> None:
    changed = with_tile(BASE, SPACE, TILES[0])
    assert tile_of(changed, SPACE) == TILES[0]
    assert changed.attention_decode | {256: tile_of(BASE, SPACE)} == BASE.attention_decode
    assert with_tile(changed, SPACE, tile_of(BASE, SPACE)) == BASE
    conv = next(space for space in spaces() if space.name == "conv1d")
    assert with_tile(BASE, conv, TILES[0]).conv1d == TILES[0]


def test_every_space_is_a_tile_of_the_shipped_files() -> None:
    for space in spaces():
        for gpu in (None, "NVIDIA H200"):
            assert tile_of(shipped(gpu), space), f"{space.name} is in no table of {gpu}"
        assert len(set(space.tiles)) == len(space.tiles) > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.attention(AttentionShape(16, 4, 64), [(1, 40), (1, 7)]),
        lambda w: w.attention(AttentionShape(4, 2, 40, 16, sinks=True), [(20, 40), (3, 3)]),
        lambda w: w.delta_rule(DeltaRuleShape(2, 4, 64, 32, 2.0), [5, 3]),
        *nightly(lambda w: w.convolution(ConvolutionShape(512, 4, bias=True), [5, 66])),
    ],
    ids=["decode", "prefill", "delta rule", "convolution"],
)
def test_workloads_are_valid_calls(device: str, make: Any) -> None:
    made = make(Workloads(CudaKernels(), torch.device(device)))
    args = [computable(value) for value in made.args]
    inputs = {name: computable(value) for name, value in made.keywords.items()}
    out = (inputs["out"] if "out" in inputs else args[0].out).fill_(math.nan)
    made.func(*args, **inputs)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "shape",
    [
        ExpertsShape(9, 8, 64, 16, shared=True),
        *nightly(ExpertsShape(4, 2, 64, 16, gated=False)),
        *nightly(ExpertsShape(4, 2, 64, 16, biases=True, clamp=ClampedSwiglu(1.7, 7.0, 1.0))),
    ],
    ids=["shared", "without gate", "biases"],
)
def test_workloads_of_experts_are_valid_calls(device: str, shape: ExpertsShape) -> None:
    made = Workloads(CudaKernels(), torch.device(device)).experts(shape, 3)
    assert made.func(computable(made.args[0])).isfinite().all()


def test_the_workload_of_single_tokens_is_a_valid_call(device: str) -> None:
    workloads = Workloads(CudaKernels(), torch.device(device))
    made = workloads.delta_rule_tokens(DeltaRuleShape(2, 4, 16, 24), 3)
    out, _ = made.func(*map(computable, made.args), **made.keywords)
    assert out.shape == (1, 3, 4, 24) and out.isfinite().all()


def computable(value: Any) -> Any:
    """The interpreter computes bf16 products wrongly."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and value.is_cpu:
        return value.float()
    if is_dataclass(value):
        return type(value)(*(computable(getattr(value, f.name)) for f in fields(value)))
    return value


def test_the_command_names_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--list", "--only", "state", "conv"]) == 0
    names = [f"gdn_state.{width}" for width in (64, 128, 256)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*names, "conv1d"]
    assert lines[1].endswith(" 16/32 heads of 128 x 128")
    assert main(["tune", "--only", "nothing"]) == 1
    assert "names no table" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(platforms, "_current", CpuPlatform())
    assert main(["tune"]) == 1
    assert "belong to a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert main(["tune", "--only", "gdn_intra", "--output", str(path)]) == 0
    assert capsys.readouterr().out.startswith("gdn_intra")
    assert read_tile_file(path).gpu == torch.cuda.get_device_name()
