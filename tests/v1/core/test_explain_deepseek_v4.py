# SPDX-License-Identifier: Apache-2.0
"""What DeepSeek-V4 keeps and weighs in the released sizes, against arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_configs import deepseek_v4_fields
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.base import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.explain import GroupReport, explain

BOTH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "max_position_embeddings": 1048576,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}
FLASH = {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}


@dataclass(frozen=True)
class Expected:
    """`sparse` and `dense`: layers with entries of 4 and of 128 tokens; `growing`: bytes of a
    request per token, past all windows; `parameters`: in billions."""

    layers: int
    sparse: int
    dense: int
    growing: int
    parameters: int


CASES = {
    "Flash": (FLASH, Expected(43, 21, 20, 21 * 320 + 20 * 8, 284)),
    "Pro": (PRO, Expected(61, 30, 31, 30 * 320 + 31 * 8, 1573)),
}
released = pytest.mark.parametrize(("fields", "expected"), CASES.values(), ids=CASES)


def config_of(fields: dict[str, Any], path: Path) -> VllmConfig:
    text = json.dumps({**deepseek_v4_fields(), **BOTH, **fields})
    (path / "config.json").write_text(text)
    args = EngineArgs(model=str(path), skip_tokenizer_init=True, max_model_len=4096)
    return args.create_engine_config()


@released
def test_what_a_request_keeps(fields: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    """16-bit rows and entries of 512, keys of 128 to choose entries by; fp32 for what is not an
    entry yet: value and score of each dimension, for both of two overlapping entries."""
    # Changes of the same model in two sizes: asked of the smaller one.
    groups = explain(config_of(fields, tmp_path), what_ifs=fields is FLASH).groups

    def of(kind: str, keeps: str) -> GroupReport:
        (found,) = [one for one in groups if (one.kind, one.keeps) == (kind, f"1 rows x {keeps}")]
        return found

    # A layer's bytes in its window or per token, by what it keeps.
    windows = {
        ("sliding window 128", "512 bfloat16"): (expected.layers, 1024),
        ("sliding window 8", "2048 float32"): (expected.sparse, 8 * 1024),
        ("sliding window 8", "512 float32"): (expected.sparse, 2 * 1024),
        ("sliding window 128", "1024 float32"): (expected.dense, 4 * 1024),
    }
    entries = {
        ("entries of 4 tokens", "512 bfloat16"): (expected.sparse, 256),
        ("entries of 4 tokens", "128 bfloat16"): (expected.sparse, 64),
        ("entries of 128 tokens", "512 bfloat16"): (expected.dense, 8),
    }
    assert len(groups) == len(windows) + len(entries)
    for (kind, keeps), (layers, num_bytes) in (windows | entries).items():
        group = of(kind, keeps)
        assert (group.layers, group.bytes_per_token) == (layers, layers * num_bytes)
    growing = sum(of(*one).bytes_per_token or 0 for one in entries)
    assert growing == expected.growing == {43: 6880, 61: 9848}[expected.layers]


@released
def test_parameters(fields: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    """As many as released; experts are 16-bit here, what surrounds them float8."""
    config = config_of(fields, tmp_path)
    meta = torch.device("meta")
    with meta, set_default_torch_dtype(torch.bfloat16), set_current_vllm_config(config):
        model = initialize_model(config)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    total = sum(size for name, size in sizes.items() if not name.endswith("_scale_inv"))
    assert round(total / 1e9) == expected.parameters
    dtypes = {name.split(".", 3)[-1]: param.dtype for name, param in model.named_parameters()}
    assert dtypes["ffn.experts.gate_up_proj"] == dtypes["attn.wo_a.weight"] == torch.bfloat16
    assert dtypes["attn.wq_b.weight"] == torch.float8_e4m3fn
    assert dtypes["attn.compressor.wkv.weight"] != torch.float8_e4m3fn
    assert dtypes["ffn.shared_expert.down_proj.weight"] == torch.float8_e4m3fn
