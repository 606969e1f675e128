# SPDX-License-Identifier: Apache-2.0
"""Shards of grouped Mamba, also of more ranks than groups."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import make_config
from tests.model_executor.layers.mixer_steps import run
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.grouped_mamba import GroupedMamba, GroupedMambaShape
from vllm.model_executor.models.weights import AutoWeightsLoader
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="builds layers on the CPU")

#: 4 heads in 2 groups
SHAPE = GroupedMambaShape(
    hidden_size=32,
    inner=32,
    shared=16,
    state_size=8,
    dt_rank=5,
    conv_kernel_size=4,
    conv_bias=True,
    dt_bias=True,
)


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("qwen3_5"))
    with set_current_vllm_config(config):
        yield config


def checkpoint(shape: GroupedMambaShape) -> dict[str, Tensor]:
    channels = shape.inner if shape.repeats_first else shape.shared
    shapes = {
        "in_proj.weight": (2 * shape.inner + 2 * shape.shared, 32),
        "dt_in_proj.weight": (5, 32),
        "dt_proj.weight": (shape.inner, 5),
        "dt_proj.bias": (shape.inner,),
        "conv1d.weight": (channels, 1, 4),
        "conv1d.bias": (channels,),
        "A_log": (shape.inner, 8),
        "D": (shape.inner,),
        "out_proj.weight": (32, shape.inner),
    }
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*sizes, generator=generator, dtype=torch.float32) * 0.5
        for name, sizes in shapes.items()
    }


def build(shape: GroupedMambaShape, prefix: str, rank: int, size: int) -> GroupedMamba:
    with as_rank(rank, size):
        layer = GroupedMamba(shape, prefix)
    AutoWeightsLoader(layer).load_weights(checkpoint(shape).items())
    return layer


@pytest.mark.parametrize("repeats_first", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_sum_to_the_whole_layer(ranks: int, repeats_first: bool, config: VllmConfig) -> None:
    """Four ranks have copies of two groups' x and B."""
    shape = replace(SHAPE, repeats_first=repeats_first)
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    whole = run(build(shape, "whole", 0, 1), config, hidden, decodes=2)
    layers = [build(shape, f"part{rank}", rank, ranks) for rank in range(ranks)]
    parts = [run(layer, config, hidden, decodes=2) for layer in layers]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(parts[0], whole, atol=1e-3)
    channels = 32 // ranks if repeats_first else 8
    assert layers[-1].state_shapes() == ((3, channels), (4 // ranks, 8, 8))


def test_heads_and_groups_that_ranks_cannot_share_are_refused(config: VllmConfig) -> None:
    three = replace(SHAPE, inner=48, shared=24)
    for shape, ranks, what in (
        (three, 2, "3 groups of recurrent heads can be neither divided"),
        (SHAPE, 8, "4 recurrent heads cannot be divided"),
    ):
        with as_rank(0, ranks), pytest.raises(VLLMValidationError, match=what):
            GroupedMamba(shape, what)
