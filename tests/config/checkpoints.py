# SPDX-License-Identifier: Apache-2.0
"""Tiny `config.json` directories, without weights, and configs of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, SpeculativeConfig

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
LLAMA = {**_TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MIXTURE = {**_TEXT, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
_HYBRID_TEXT = {
    **_TEXT,
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "mamba_ssm_dtype": "float32",
}
HYBRID = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": _HYBRID_TEXT,
}
#: capture of layers 1 and 4, and who takes it
EXTRACTION: dict[str, Any] = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
}
TRANSFER = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
CONFIGS = {"llama": LLAMA, "mixture": MIXTURE, "hybrid": HYBRID}


def write_config(directory: Path, family: str = "llama", **changes: Any) -> str:
    """Write a family's `config.json` with top-level `changes`; a change of None drops the key."""
    raw = {**CONFIGS[family], **changes}
    directory.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in raw.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    return str(directory)


def extraction(model: ModelConfig) -> SpeculativeConfig:
    """Capture of layers 1 and 4."""
    return SpeculativeConfig(**EXTRACTION, target_model_config=model)
