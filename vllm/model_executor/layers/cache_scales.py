# SPDX-License-Identifier: Apache-2.0
"""Scales of keys and values in a float8 cache, one of each per layer."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from vllm import decisions
from vllm.model_executor.parameter import default_weight_loader
from vllm.model_executor.utils import AfterLoading, set_weight_attrs

#: how checkpoints end the scales' names -> how ours end
_NAMES = {
    f"{place}.{kind}_scale": f"{ours}.cache_scales.{kind}_scale"
    for kind in ("k", "v")
    for place, ours in (
        (f".{kind}_proj", ".attn"),
        (".self_attn", ".self_attn.attn"),
        (".mixer", ".mixer.attn"),
        (".attn", ".attn"),
    )
}


class CacheScales(nn.Module, AfterLoading):
    """`k_scale`, `v_scale`: from the checkpoint, or 1. The kernels get them as numbers, `k` and
    `v`: they never change but with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale, self.v_scale = self._one(), self._one()
        self.k = self.v = 1.0

    @staticmethod
    def _one() -> nn.Parameter:
        param = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False)
        attrs = {"weight_loader": default_weight_loader, "dummy_range": (1.0, 1.0)}
        set_weight_attrs(param, attrs | {"optional": True, "default": 1.0})
        return param

    def process_weights_after_loading(self) -> None:
        self.k, self.v = float(self.k_scale), float(self.v_scale)
        if not (self.k > 0 and self.v > 0):
            raise ValueError(f"cache scales must be positive, found {self.k} and {self.v}")

    def captured_numbers(self) -> tuple[float, ...]:
        return self.k, self.v


def rename_cache_scales(
    weights: Iterable[tuple[str, Tensor]], model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """The stream with our names of the scales; without them, which is recorded, where no layer of
    the `model` that is loaded has any."""
    used = any(isinstance(module, CacheScales) for module in model.modules())
    for name, tensor in weights:
        ending = next((old for old in _NAMES if name.endswith(old)), None)
        if ending is None:
            yield name, tensor
        elif used:
            yield name.removesuffix(ending) + _NAMES[ending], tensor
        else:
            why = "keys and values are not kept in float8; --kv-cache-dtype fp8 does"
            decisions.record("the checkpoint's k_scale and v_scale", "not loaded", why)
