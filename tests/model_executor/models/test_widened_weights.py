# SPDX-License-Identifier: Apache-2.0
"""Float8 tensors that become 16-bit while they load: every order, every kind of scale."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from vllm import decisions
from vllm.kernels.fp8 import FP8
from vllm.model_executor.models.weights import WeightsError, widened

VALUES = torch.randn(200, 130).to(FP8)
LAYER = "model.layers.0.self_attn.kv_b_proj"


def load(weights: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return dict(widened(weights, ("kv_b_proj",), torch.float32))


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("weight_scale", torch.tensor(0.5)),
        ("weight_scale", torch.rand(200, 1)),
        ("weight_scale_inv", torch.rand(2, 2)),
    ],
)
def test_weights_are_multiplied_by_their_scales(kind: str, scale: Tensor) -> None:
    block = torch.arange(200)[:, None] // 128, torch.arange(130)[None] // 128
    wide = scale[block] if scale.shape == (2, 2) else scale
    tensors = {
        f"{LAYER}.weight": VALUES,
        f"{LAYER}.{kind}": scale,
        f"{LAYER}.input_scale": torch.ones(1),
        "model.layers.0.self_attn.o_proj.weight": VALUES,
    }
    for order in permutations(tensors):
        found = load([(name, tensors[name]) for name in order])
        assert found.keys() == {f"{LAYER}.weight", "model.layers.0.self_attn.o_proj.weight"}
        assert torch.equal(found[f"{LAYER}.weight"], VALUES.float() * wide)
    assert any(d.what == "float8 weights of kv_b_proj" for d in decisions.decisions())


def test_what_has_no_partner_passes() -> None:
    """The loader reports it."""
    assert load([(f"{LAYER}.weight", VALUES)]).keys() == {f"{LAYER}.weight"}
    scale = f"{LAYER}.weight_scale"
    assert load([(scale, torch.ones(1))]).keys() == {scale}
    wide = VALUES.float()
    assert load([(f"{LAYER}.weight", wide)])[f"{LAYER}.weight"] is wide


def test_scales_of_no_known_shape() -> None:
    scale = (f"{LAYER}.weight_scale_inv", torch.rand(3, 2))
    wrong = rf"mis-shaped: {LAYER}\.weight_scale_inv: expected shape \[2, 2\], found \[3, 2\]"
    with pytest.raises(WeightsError, match=wrong):
        load([(f"{LAYER}.weight", VALUES), scale])
