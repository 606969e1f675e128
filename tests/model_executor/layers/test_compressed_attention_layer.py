# SPDX-License-Identifier: Apache-2.0
"""A layer of compressed attention against its equations, in any split into steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import make_config
from tests.model_executor.layers.compressed_steps import (
    SHAPES,
    LayerSteps,
    expected,
    hidden,
    make_layer,
)
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig, set_current_vllm_config

RATIOS = list(SHAPES)
LENGTH = 300


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("llama"))
    with set_current_vllm_config(config):
        yield config


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("ratio", RATIOS)
def test_one_pass(ratio: int, config: VllmConfig) -> None:
    layer, x = make_layer(SHAPES[ratio]), hidden(LENGTH, SHAPES[ratio])
    out = LayerSteps(layer, config).step([(1, 0, LENGTH)], [x, x, x])
    close(out, expected(layer, x))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", range(3))
def test_random_chunks_and_batches(ratio: int, seed: int, config: VllmConfig) -> None:
    """Three sequences side by side: decodes, then prefills of any length."""
    layer, rng = make_layer(SHAPES[ratio]), random.Random(seed)
    streams = [hidden(LENGTH, SHAPES[ratio], seed=i) for i in range(3)]
    steps, done = LayerSteps(layer, config), [0, 0, 0]
    outs: list[list[Tensor]] = [[], [], []]
    while min(done) < LENGTH:
        todo = [seq for seq in range(3) if done[seq] < LENGTH and rng.random() < 0.8]
        sizes = {seq: rng.choice([1, 1, 2, 5, 40, 131]) for seq in todo}
        chunks = [(s, done[s], min(sizes[s], LENGTH - done[s])) for s in todo]
        chunks.sort(key=lambda chunk: not (chunk[1] > 0 and chunk[2] == 1))
        if not chunks:
            continue
        out = steps.step(chunks, streams, padding=rng.choice([0, 3]))
        for (seq, _, length), part in zip(
            chunks, out.split([length for _, _, length in chunks]), strict=True
        ):
            outs[seq].append(part)
            done[seq] += length
    for seq, stream in enumerate(streams):
        close(torch.cat(outs[seq]), expected(layer, stream))
