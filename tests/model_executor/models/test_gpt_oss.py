# SPDX-License-Identifier: Apache-2.0
"""gpt-oss checkpoints in mxfp4, and what of them cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_executor.harness import Chunk, Harness, make_config
from tests.tiny_models import hf_reference_logits, make_tiny
from vllm import decisions
from vllm.model_executor.layers.quantization.mxfp4 import dequantised
from vllm.model_executor.models.gpt_oss import experts_apart
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.parameter import WeightDtypeError, WeightShapeError

pytestmark = pytest.mark.parity
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(4)).tolist()
F32 = torch.float32


def random_mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of `[..., 32 * runs]` numbers of about 0.1."""
    generator = torch.Generator().manual_seed(sum(shape))
    runs = (*shape[:-1], shape[-1] // 32)
    blocks = torch.randint(0, 256, (*runs, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 124, runs, generator=generator, dtype=torch.uint8)


def test_numbers() -> None:
    """All 16 codes, low bits first, under scales of 1, 1/4 and 2."""
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = torch.stack([codes[0::2] | codes[1::2] << 4] * 2).flatten().expand(3, 16)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = torch.cat([positive, -positive]).repeat(2)
    found = dequantised(blocks, torch.tensor([127, 125, 128], dtype=torch.uint8), torch.bfloat16)
    scales = torch.tensor([1.0, 0.25, 2.0])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float().view(3, 32), scales[:, None] * expected)


def test_what_is_no_mxfp4_is_refused() -> None:
    blocks, scales = random_mxfp4(2, 64)
    with pytest.raises(WeightShapeError, match=r"expected shape \[2, 2, 16\], found \[2, 2, 8\]"):
        dequantised(blocks[..., :8], scales, F32)
    with pytest.raises(WeightDtypeError, match="stored as uint8, not torch.int8"):
        dequantised(blocks.view(torch.int8), scales, F32)


def test_an_mxfp4_checkpoint_is_its_16_bit_form(tmp_path: Path) -> None:
    """transformers computes the same from the dequantised weights; the choice is recorded."""
    path = make_tiny("gpt_oss", tmp_path)
    file, config = path / "model.safetensors", path / "config.json"
    tensors = load_file(file)
    stored = {
        name: x for name, x in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))
    }
    for name in tensors.keys() - stored.keys():
        experts, columns, rows = tensors[name].shape
        blocks, scales = random_mxfp4(experts, rows, columns)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = dequantised(blocks, scales, F32).mT.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    expected = hf_reference_logits(path, IDS)
    save_file(stored, file, metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    fields = json.loads(config.read_text()) | {"quantization_config": quantization}
    config.write_text(json.dumps(fields))
    decisions.clear()
    found = Harness(path).logits([Chunk(0, 0, IDS)])
    assert float((found - expected).abs().max() / expected.std()) < 5e-5
    records = {each.what: each.chosen for each in decisions.decisions()}
    assert records["mxfp4 experts"] == "made float32 while they load"
    save_file(
        {name: x for name, x in stored.items() if "0.mlp.experts.down_proj_scales" not in name},
        file,
    )
    with pytest.raises(WeightsError, match=r"surplus: model\.layers\.0.*down_proj_blocks"):
        Harness(path, config=make_config(path))


def test_tensors_of_other_layers_pass() -> None:
    weights = {"a.mlp.experts.router": torch.ones(1), "b.weight": torch.ones(2)}
    assert dict(experts_apart(weights.items(), F32)) == weights
