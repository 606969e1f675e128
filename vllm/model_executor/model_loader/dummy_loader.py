# SPDX-License-Identifier: Apache-2.0
"""Random weights: same numbers for a seed on every device, at memory speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.model_executor.utils import get_weight_attr

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# A prime: rows of a weight start at different places of the repeated pool, so none are equal.
_POOL_SIZE = 1_048_583
_STEP = 524_309


def dummy_range(param: Tensor) -> tuple[float, float]:
    """Uniform range of a parameter: what its layer declares, else unit gain.

    A matrix `[out, in]` gets `+-sqrt(3 / in)`, which keeps a signal's variance; a vector +-0.1.
    """
    bound = (3 / param.shape[-1]) ** 0.5 if param.dim() > 1 else 0.1
    low, high = get_weight_attr(param, "dummy_range", (-bound, bound))
    return low, high


def initialize_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter in place from one pool of random numbers."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    pool = torch.rand(_POOL_SIZE, generator=generator, device="cpu")
    pools: dict[torch.device, Tensor] = {}
    for index, (_, param) in enumerate(sorted(model.named_parameters())):
        if not param.is_floating_point():
            raise ValueError(f"dummy weights of dtype {param.dtype} are not supported")
        if param.device not in pools:
            pools[param.device] = pool.to(param.device)
        low, high = dummy_range(param)
        unit = torch.roll(pools[param.device], index * _STEP % _POOL_SIZE)
        _tile(param.data.view(-1), (low + (high - low) * unit).to(param.dtype))


def _tile(target: Tensor, pattern: Tensor) -> None:
    """Fill `target [n]` with repetitions of `pattern [p]`."""
    whole = len(target) // len(pattern) * len(pattern)
    target[:whole].view(-1, len(pattern)).copy_(pattern)
    target[whole:].copy_(pattern[: len(target) - whole])


class DummyModelLoader(BaseModelLoader):
    """`load_format="dummy"`."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        initialize_dummy_weights(model, model_config.seed or 0)
