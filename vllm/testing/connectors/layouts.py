# SPDX-License-Identifier: Apache-2.0
"""Small models as a connector sees them: what their layers keep, and a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

_FP32 = torch.float32
_SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": _FP32}
_ATTENTION: dict[str, KVCacheSpec] = {
    "layers.0.attn": FullAttentionSpec(**_SIZES),
    "layers.2.attn": FullAttentionSpec(**_SIZES),
}
_RECURRENT: dict[str, KVCacheSpec] = {
    "layers.1.mixer": MambaSpec(16, ((3, 8), (2, 4, 4)), (_FP32, _FP32)),
    "layers.3.mixer": MambaSpec(16, ((3, 8), (2, 4, 4)), (_FP32, _FP32)),
}
_WINDOW: dict[str, KVCacheSpec] = {
    "layers.1.attn": SlidingWindowSpec(**_SIZES, sliding_window=24),
}
_ROWS: dict[str, KVCacheSpec] = {
    "rows": HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=4, dtype=_FP32),
}
_ROW: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": _FP32}
_COMPRESSED: dict[str, KVCacheSpec] = {
    "layers.0.tokens": SlidingWindowMLASpec(**_ROW, block_size=16, sliding_window=24),
    "layers.0.entries": MLAAttentionSpec(**_ROW, block_size=16, compress_ratio=4),
    "layers.1.tokens": SlidingWindowMLASpec(**_ROW, block_size=16, sliding_window=24),
    "layers.1.entries": MLAAttentionSpec(**_ROW, block_size=32, compress_ratio=32),
}

#: kind of model -> what its layers keep
LAYOUTS: dict[str, dict[str, KVCacheSpec]] = {
    "attention": _ATTENTION,
    "window": {**_ATTENTION, **_WINDOW},
    "compressed": _COMPRESSED,
    "hybrid": {**_ATTENTION, **_RECURRENT},
    "hybrid_rows": {**_ATTENTION, **_RECURRENT, **_ROWS},
}

_MODEL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 255,
}
_ATTENTION_MODEL = {**_MODEL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_HYBRID_MODEL = {
    **_MODEL,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def make_config(kind: str, directory: Path, **arguments: Any) -> VllmConfig:
    """An engine's configuration for a model of this kind, as the flags of a server would make it;
    `arguments` are those of `EngineArgs`. The checkpoint's config is written to `directory`."""
    recurrent = any(spec.is_recurrent for spec in LAYOUTS[kind].values())
    directory.mkdir(parents=True, exist_ok=True)
    model = _HYBRID_MODEL if recurrent else _ATTENTION_MODEL
    (directory / "config.json").write_text(json.dumps(model))
    args = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        async_scheduling=False,
        max_model_len=160,
        **arguments,
    )
    return args.create_engine_config()
