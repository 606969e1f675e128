# SPDX-License-Identifier: Apache-2.0
"""What OLMo-hybrid checkpoints may have beside what the released ones have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.harness import Chunk, Harness
from tests.tiny_models import hf_reference_logits, make_tiny

pytestmark = pytest.mark.parity
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(4)).tolist()


def test_rotation_betas_up_to_one_wide_heads_and_one_convolution(tmp_path: Path) -> None:
    """A config with a base rotates, one without negative eigenvalues halves the betas, and one may
    say how wide heads are; q, k and v may have one convolution."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    fields = {"linear_allow_neg_eigval": False, "head_dim": 24}
    path = make_tiny("olmo_hybrid", tmp_path, rope_parameters=rope, **fields)
    expected = hf_reference_logits(path, IDS)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        prefix = f"model.layers.{layer}.linear_attn"
        parts = [tensors.pop(f"{prefix}.{part}_conv1d.weight") for part in "qkv"]
        tensors[f"{prefix}.conv1d.weight"] = torch.cat(parts)
    save_file(tensors, file, metadata={"format": "pt"})
    found = Harness(path).logits([Chunk(0, 0, IDS)])
    assert float((found - expected).abs().max() / expected.std()) < 5e-5


def test_an_unknown_layer_type_is_named(tmp_path: Path) -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    path = make_tiny("olmo_hybrid", tmp_path, layer_types=kinds)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"linear_', '"sliding_', 1))
    with pytest.raises(ValueError, match=r"layers\.0 has type 'sliding_attention'; supported"):
        Harness(path)
