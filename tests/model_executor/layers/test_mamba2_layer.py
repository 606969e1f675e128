# SPDX-License-Identifier: Apache-2.0
"""Mamba2's layer: its gated norms, shards of it, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from tests.kernels.cases import error_ratio
from tests.model_executor.harness import make_config
from tests.model_executor.layers.mixer_steps import run
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers import mamba2
from vllm.model_executor.layers.mamba2 import GatedGroupNorm, Mamba2, Mamba2Shape
from vllm.model_executor.models.weights import AutoWeightsLoader
from vllm.model_executor.parameter import Section

SHAPE = Mamba2Shape(32, 8, 8, 12, 4, conv_kernel_size=4, eps=1e-5, norm_groups=4)


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("qwen3_5"))
    with set_current_vllm_config(config):
        yield config


def checkpoint(shape: Mamba2Shape) -> dict[str, Tensor]:
    channels = shape.width + 2 * shape.num_groups * shape.state_size
    rows = shape.width + channels + shape.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (rows, shape.hidden_size),
        "conv1d.weight": (channels, 1, shape.conv_kernel_size),
        "conv1d.bias": (channels,),
        "A_log": (shape.num_heads,),
        "dt_bias": (shape.num_heads,),
        "D": (shape.num_heads,),
        "norm.weight": (shape.width,),
        "out_proj.weight": (shape.hidden_size, shape.width),
    }
    if shape.proj_bias:
        shapes |= {"in_proj.bias": (rows,), "out_proj.bias": (shape.hidden_size,)}
    if not shape.norm_groups:
        del shapes["norm.weight"]
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float32) * 0.5
        for name, shape in shapes.items()
    }


def build(shape: Mamba2Shape, prefix: str, rank: int, size: int) -> Mamba2:
    with as_rank(rank, size):
        layer = Mamba2(shape, prefix)
    AutoWeightsLoader(layer).load_weights(checkpoint(shape).items())
    return layer


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, norm_groups=0),
        replace(SHAPE, norm_before_gate=True, proj_bias=True),
        replace(SHAPE, norm_groups=0, num_groups=1, multipliers=(0.5, 1.5, 2.0, 0.7, 1.1)),
    ],
    ids=["norm of gated", "gate alone", "gate after norm, biases", "one group, multipliers"],
)
def test_shards_add_up_to_the_whole(shape, config):
    hidden = torch.randn(9, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    whole = run(build(shape, "whole", 0, 1), config, hidden, decodes=2)
    parts = []
    for rank in range(2):
        layer = build(shape, f"rank{rank}", rank, 2)
        layer.out_proj.reduce_results = False
        parts.append(run(layer, config, hidden, decodes=2))
    # Terms are large and cancel where no norm keeps them near 1.
    assert error_ratio(sum(parts), whole.double()) < 1e-5


def test_groups_that_ranks_cannot_share_are_refused(config):
    with pytest.raises(VLLMValidationError, match="groups of recurrent heads"):
        build(replace(SHAPE, num_heads=12, num_groups=3, norm_groups=3), "layer", 0, 2)


@pytest.mark.parametrize("before", [False, True])
def test_gated_norms_are_those_of_transformers(before):
    torch.manual_seed(0)
    y, z, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    ours = GatedGroupNorm(Section(0, 48), 3, 1e-5, norm_before_gate=before)
    ours.weight.data = weight
    theirs = FalconH1RMSNormGated(48, 1e-5, n_groups=3, norm_before_gate=before)
    theirs.weight.data = weight
    torch.testing.assert_close(ours(y, z), theirs(y[None], z[None])[0].detach())


def test_ranks_add_up_the_squares_of_groups_they_share(monkeypatch):
    """Two groups on four ranks, each with half of one."""
    torch.manual_seed(0)
    y, z, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    whole = GatedGroupNorm(Section(0, 48), 2, 1e-5, norm_before_gate=False)
    whole.weight.data = weight
    norms = []
    for rank in range(4):
        norms.append(GatedGroupNorm(Section(0, 48, 4, rank), 2, 1e-5, norm_before_gate=False))
        norms[rank].weight.weight_loader(norms[rank].weight, weight)
    inputs = list(zip(y.chunk(4, 1), z.chunk(4, 1), strict=True))
    told: list[Tensor] = []
    monkeypatch.setattr(mamba2, "tensor_model_parallel_all_reduce", lambda x: told.append(x) or x)
    for norm, (own, gate) in zip(norms, inputs, strict=True):
        norm(own, gate)
    monkeypatch.setattr(mamba2, "tensor_model_parallel_all_reduce", lambda x: sum(told[:4]))
    parts = [norm(*each) for norm, each in zip(norms, inputs, strict=True)]
    torch.testing.assert_close(torch.cat(parts, 1), whole(y, z))


def test_what_it_keeps(config):
    """Of one of two ranks: half of the heads, and of the channels."""
    spec = build(SHAPE, "layer", 1, 2).get_kv_cache_spec(config)
    assert spec.shapes == ((3, 32 + 2 * 2 * 12), (4, 8, 12))
    assert spec.mamba_type.value == "mamba2"
