# SPDX-License-Identifier: Apache-2.0
"""What relatives of Gemma 3 have and the family does not serve; names of older checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.harness import Chunk, Harness
from tests.tiny_models import hf_reference_logits, make_tiny, tiny_model
from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.gemma3 import check, rounded
from vllm.transformers_utils.config import get_config

pytestmark = pytest.mark.parity
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping is not supported"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is not supported"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention is not supported"),
        ("layer_types", ["chunked_attention"] * 4, r"layers of type \['chunked_attention'\]"),
    ],
)
def test_what_is_refused(field: str, value: Any, message: str) -> None:
    config = get_config(str(tiny_model("gemma3")), trust_remote_code=False)
    check(config)
    object.__setattr__(config, field, value)
    with pytest.raises(VLLMValidationError, match=message):
        check(config)


def test_embeddings_scale_is_rounded_like_a_weight() -> None:
    assert rounded(2560**0.5, torch.bfloat16) == 50.5
    assert abs(rounded(2560**0.5, torch.float32) - 2560**0.5) < 2e-6


def test_both_orders_of_names(tmp_path: Path) -> None:
    """`language_model.model.` and `model.language_model.`; images' tensors are left out and said
    so."""
    path = make_tiny("gemma3_wrapper", tmp_path)
    expected = hf_reference_logits(path, IDS)
    file = path / "model.safetensors"
    for _ in range(2):
        decisions.clear()
        found = Harness(path).logits([Chunk(0, 0, IDS)])
        assert float((found - expected).abs().max() / expected.std()) < 5e-5
        left_out = {each.what for each in decisions.decisions()}
        parts = ("vision_tower", "multi_modal_projector")
        assert {f"checkpoint tensors {part}.*" for part in parts} <= left_out
        renamed = {
            f"model.language_model.{name.removeprefix('language_model.model.')}"
            if name.startswith("language_model.")
            else f"model.{name}": tensor
            for name, tensor in load_file(file).items()
        }
        save_file(renamed, file, metadata={"format": "pt"})
