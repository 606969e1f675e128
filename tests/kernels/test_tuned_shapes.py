# SPDX-License-Identifier: Apache-2.0
"""`vllm tune MODEL`: workloads have the sizes of what the model's layers launch, and read the tile
that they are to compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import Chunk, Harness
from tests.tiny_models import tiny_model
from vllm.distributed.parallel_state import GroupCoordinator, as_first_rank_of
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.cli.tune import model_shapes
from vllm.kernels.attention import SHORT_ROWS, AttentionProblem
from vllm.kernels.fp8 import FP8
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.moe import ExpertsProblem, RoutingRule
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.triton.configs import pick, shipped
from vllm.kernels.triton.tile_files import Tile
from vllm.kernels.tuning.shapes import DEFAULT, AttentionShape, KernelShapes
from vllm.kernels.tuning.spaces import Space, spaces
from vllm.kernels.tuning.sweep import with_tile
from vllm.kernels.tuning.workloads import Workloads
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnPrefill
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.platforms import current_platform

FAMILIES = (
    "llama", "gemma3", "qwen3_5", "qwen3_5_moe", "mixtral", "gpt_oss", "nemotron_h_moe",
    "kimi_linear", "olmo_hybrid", "falcon_h1",
)  # fmt: skip
BASE = shipped("NVIDIA H200")
MINE = Tile(7, 7, 7, 7)
Sizes = dict[str, set[tuple[Any, ...]]]


class Launches(NaiveKernels):
    """The sizes of ops that were launched."""

    def __init__(self) -> None:
        self.sizes: Sizes = defaultdict(set)

    def paged_attention(self, p: AttentionProblem) -> None:
        self.add_attention(p)
        super().paged_attention(p)

    def latent_attention(self, p: LatentAttentionProblem) -> None:
        # What is made of it where it is expanded: `expanded.attend_by_head`.
        self.sizes["attention"].add((1, 1, p.query.shape[2], None, False, p.num_heads))
        super().latent_attention(p)

    def causal_conv1d(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        self.add_convolution(weight, args[0])
        super().causal_conv1d(x, weight, *args, **kwargs)

    def gdn_prefill(self, p: GdnPrefill) -> None:
        self.sizes["delta rule"].add((*p.heads, p.beta_scale))
        super().gdn_prefill(p)

    def run_experts(self, p: ExpertsProblem) -> Tensor:
        self.add_experts(p)
        return super().run_experts(p)

    def add_attention(self, p: AttentionProblem, apart: int = 0) -> None:
        heads = (p.num_heads, p.num_kv_heads, p.head_dim)
        self.sizes["attention"].add((*heads, p.sliding_window, p.sinks is not None, apart))

    def add_convolution(self, weight: Tensor, bias: Tensor | None) -> None:
        self.sizes["convolution"].add((*weight.shape, bias is not None))

    def add_experts(self, p: ExpertsProblem) -> None:
        biases = p.gate_up_bias is not None
        stacks = (*p.gate_up.shape, *p.down.shape, p.experts.shape[1])
        self.sizes["experts"].add((*stacks, p.gated, biases, p.clamp, p.scales is None))


def workload_sizes(shapes: KernelShapes) -> Sizes:
    """Of all that is timed, on the meta device."""
    found, workloads = Launches(), Workloads(NaiveKernels(), torch.device("meta"))
    for space in spaces(shapes):
        for make, run in zip(space.workloads, space.runs(workloads), strict=True):
            args: tuple[Any, ...] = run.args
            if space.field.startswith("attention"):
                found.add_attention(args[0], make.keywords["shape"].heads_apart)
            elif space.field.startswith("moe"):
                found.add_experts(args[0])
            elif space.field == "conv1d":
                found.add_convolution(*args[1:3])
            elif space.field != "gdn_decode":
                found.sizes["delta rule"].add((*args[0].heads, args[0].beta_scale))
    return found.sizes


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Of this process, which does what ranks exchange by itself."""
    monkeypatch.setattr(GroupCoordinator, "all_reduce", lambda self, x, in_place=False: x)
    monkeypatch.setattr(
        GroupCoordinator,
        "all_gather",
        lambda self, x, dim=-1: torch.cat([x] * self.world_size, dim),
    )
    kernels = Launches()
    monkeypatch.setitem(vars(current_platform), "kernels", kernels)
    yield kernels


def run_prefill(family: str) -> None:
    with torch.inference_mode():
        Harness(tiny_model(family), num_seqs=1).step([Chunk(0, 0, [40, 41, 42])])


@pytest.mark.parametrize("family", FAMILIES)
def test_workloads_have_the_sizes_of_what_layers_launch(family: str, launches: Launches) -> None:
    run_prefill(family)
    assert launches.sizes
    assert workload_sizes(model_shapes(str(tiny_model(family)), 1)) == launches.sizes


@pytest.mark.parametrize("family", ["qwen3_5_moe", "kimi_linear"])
def test_workloads_have_the_sizes_of_a_rank(family: str, launches: Launches) -> None:
    whole = workload_sizes(model_shapes(str(tiny_model(family)), 1))
    with as_first_rank_of(2):
        run_prefill(family)
    assert workload_sizes(model_shapes(str(tiny_model(family)), 2)) == launches.sizes
    assert all(launches.sizes[op].isdisjoint(sizes) for op, sizes in whole.items())


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_every_workload_reads_the_tile_it_compares(family: str | None) -> None:
    shapes = DEFAULT if family is None else model_shapes(str(tiny_model(family)), 1)
    workloads = Workloads(NaiveKernels(), torch.device("meta"))
    for space in spaces(shapes):
        for run in space.runs(workloads):
            problem = run.args[0]
            assert reads(space, problem), f"{space.name}: {problem}"


def reads(space: Space, problem: Any) -> bool:
    """Whether the kernel's launch has the tile of a space."""
    from vllm.kernels.attention.triton_decode import decode_tile
    from vllm.kernels.moe.triton import block_rows

    configs = with_tile(BASE, space, MINE)
    if isinstance(problem, ExpertsProblem):
        pairs = problem.experts.numel()
        return block_rows(pairs, problem.num_experts, configs) == space.width
    if isinstance(problem, AttentionProblem):
        if problem.max_query_len * problem.group > SHORT_ROWS:
            return pick(configs.attention_prefill, problem.head_dim) == MINE
        heads = (problem.num_seqs, problem.num_kv_heads, problem.head_dim)
        return decode_tile(configs, *heads) == MINE
    if space.field == "gdn_state":
        return pick(configs.gdn_state, problem.heads[2]) == MINE
    return space.width is None


@pytest.mark.parametrize("weights", ["rows", "block"])
def test_float8_experts_have_the_layers_scales(weights: Any) -> None:
    shape = MixtureShape(256, 128, 4, RoutingRule(2), shared_intermediate_size=128)
    mixture = MixtureOfExperts(shape, "mlp", Fp8Config(weights))
    (told,) = mixture.kernel_shapes().experts
    workloads = Workloads(NaiveKernels(), torch.device("meta"))
    few, many = (workloads.experts(told, tokens).args[0] for tokens in (1, 40))
    scales = mixture.experts.method.scales(mixture.experts)
    assert [each.shape for each in few.scales.both] == [each.shape for each in scales.both]
    assert few.gate_up.dtype == few.down.dtype == mixture.experts.down_proj.dtype == FP8
    assert few.gate_up.shape == mixture.experts.gate_up_proj.shape
    assert many.gate_up is few.gate_up and str(told).endswith("float8")
    other = workloads.experts(replace(told, scales=None), 1).args[0]
    assert other.scales is None and other.down.dtype == torch.bfloat16


def test_heads_of_no_table_and_groups_of_many_heads() -> None:
    wide, many = AttentionShape(8, 4, 512), AttentionShape(128, 1, 64)
    assert not any(space.workloads for space in spaces(KernelShapes(attention=(wide,))))
    workloads = Workloads(NaiveKernels(), torch.device("meta"))
    decode = next(s for s in spaces(KernelShapes(attention=(many,))) if s.name.endswith("few.64"))
    lengths = {run.args[0].max_query_len for run in decode.runs(workloads)}
    assert lengths == {1}


def test_the_command_lists_what_a_model_reads(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model("qwen3_5_moe"))
    assert main(["tune", model, "-tp", "2", "--list"]) == 0
    captured = capsys.readouterr()
    lines = [line.split(maxsplit=1) for line in captured.out.splitlines()]
    assert ["attention_decode.64", "2/1 heads of 32"] in lines
    assert ["gdn_state.64", "1/2 heads of 16 x 24"] in lines
    assert any(name == "moe_down.128" for name, _ in lines)
    assert not any(".256" in name for name, _ in lines)
    assert "left out" in captured.err and "attention_prefill.256" in captured.err


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model("llama"))
    for words, message in (
        ([str(tmp_path / "none")], "is neither a local directory nor the name of a model"),
        (["-tp", "2"], "give the MODEL"),
        ([model, "-tp", "3"], "4 attention heads cannot be divided among 3"),
        ([model, "--only", "gdn"], "has no kernel that reads gdn_state.64"),
        ([model, "--only", "nothing"], "names no table"),
    ):
        assert main(["tune", *words, "--list"]) == 1
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
