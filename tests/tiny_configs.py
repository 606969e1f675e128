# SPDX-License-Identifier: Apache-2.0
"""Configs of the tiny checkpoints: every family's smallest shape that has each of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    FalconH1Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_TOKEN_ID = 256 + SPECIAL_TOKENS.index("<|im_end|>")
PAD_TOKEN_ID = 256 + SPECIAL_TOKENS.index("<|pad|>")
MAX_POSITION = 4096

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITION,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
    "pad_token_id": PAD_TOKEN_ID,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_QWEN3_5: dict[str, Any] = {
    **_COMMON,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: a shared expert of the others' size
_QWEN3_5_MOE = {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 32}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_KIMI_LINEAR: dict[str, Any] = {
    **{k: v for k, v in _COMMON.items() if k not in ("head_dim", "max_position_embeddings")},
    **_LATENT,
    "model_max_length": MAX_POSITION,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_NEMOTRON_H: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if key != "num_hidden_layers"},
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    # transformers clamps step sizes of prompts by it, and none of single tokens.
    "time_step_min": 1e-9,
}
_MAMBA2: dict[str, Any] = {
    "head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_GRANITE_H: dict[str, Any] = {
    **_COMMON,
    **_MAMBA2,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 1.4,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
#: no multiplier is 1
_FALCON_H1: dict[str, Any] = {
    **_COMMON,
    **_MAMBA2,
    "mamba_d_ssm": 128,
    "embedding_multiplier": 0.6,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.6,
    "ssm_out_multiplier": 4.0,
    "ssm_multipliers": [1.4, 1.8, 2.2, 2.4, 0.6],
    "mlp_multipliers": [1.4, 0.7],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
#: with groups of experts, several shared experts, and a rotation whose factors all differ
_DEEPSEEK_V3: dict[str, Any] = {
    **{k: v for k, v in _COMMON.items() if k != "head_dim"},
    **_LATENT,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_POSITION // 4,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
#: two rotations and windows; a scale of its own
_GEMMA3: dict[str, Any] = {
    **_COMMON,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
# Queries come from the hidden state, as in V2-Lite.
_DEEPSEEK_V2: dict[str, Any] = {
    **{k: v for k, v in _DEEPSEEK_V3.items() if k != "rope_parameters"},
    "q_lora_rank": None,
    "topk_method": "group_limited_greedy",
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.0,
}


def deepseek_v4_fields() -> dict[str, Any]:
    """A config as released ones are spelled: every kind of layer, experts by token and by score.

    With fewer index heads scores are equal, zero, and transformers chooses between them in another
    order from pass to pass; with a head so small YaRN's bounds lie apart.
    """
    return {
        **{name: value for name, value in _COMMON.items() if name != "intermediate_size"},
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "routed_scaling_factor": 1.5,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 4, 128, 4, 0],
        "compress_rope_theta": 160000.0,
        "num_hash_layers": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 8,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
    }


def _wrapper_config(wrapper: Any, text_config: dict[str, Any]) -> Any:
    return wrapper(
        text_config=text_config,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        image_token_id=VOCAB_SIZE - 1,
        video_token_id=VOCAB_SIZE - 1,
        vision_start_token_id=VOCAB_SIZE - 1,
        vision_end_token_id=VOCAB_SIZE - 1,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama3_rope": lambda: LlamaConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        rope_parameters=_LLAMA3_ROPE,
        attention_bias=True,
        mlp_bias=True,
    ),
    # Heads of the size that follows from the others, as in released checkpoints.
    "qwen2": lambda: Qwen2Config(
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON),
    "qwen3_sliding": lambda: Qwen3Config(
        **{**_COMMON, "tie_word_embeddings": True},
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_QWEN3_5),
    "qwen3_5_tied": lambda: Qwen3_5TextConfig(**{**_QWEN3_5, "tie_word_embeddings": True}),
    # Head sizes that GPU kernels specialise for.
    "qwen3_5_wide": lambda: Qwen3_5TextConfig(
        **{
            **_QWEN3_5,
            "hidden_size": 256,
            "head_dim": 256,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {**_QWEN3_5["rope_parameters"], "mrope_section": [11, 11, 10]},
        }
    ),
    "qwen3_5_wrapper": lambda: _wrapper_config(Qwen3_5Config, _QWEN3_5),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=24),
    "mixtral": lambda: MixtralConfig(
        **{**_COMMON, "intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=40,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_EXPERTS, mlp_only_layers=[1]),
    "qwen3_next": lambda: Qwen3NextConfig(
        **{**_COMMON, **_EXPERTS},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "bamba": lambda: BambaConfig(
        **{**_COMMON, **_MAMBA2},
        attn_layer_indices=[1],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
    "falcon_h1": lambda: FalconH1Config(**_FALCON_H1),
    "granite_h": lambda: GraniteMoeHybridConfig(**_GRANITE_H, num_local_experts=8),
    "granite_h_dense": lambda: GraniteMoeHybridConfig(
        **{**_GRANITE_H, "tie_word_embeddings": True},
        num_local_experts=0,
        position_embedding_type="rope",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "nemotron_h": lambda: NemotronHConfig(**_NEMOTRON_H, hybrid_override_pattern="M-*M"),
    "gpt_oss": lambda: GptOssConfig(
        **{**_COMMON, "intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITION // 32,
        },
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA3),
    "gemma3_wrapper": lambda: Gemma3Config(
        text_config=_GEMMA3,
        vision_config={
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=VOCAB_SIZE - 1,
    ),
    # Head sizes that are no powers of two, and no rotation, as in released checkpoints.
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "nemotron_h_moe": lambda: NemotronHConfig(
        **_NEMOTRON_H,
        hybrid_override_pattern="ME-*M",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**_QWEN3_5_MOE),
    "deepseek_v2": lambda: DeepseekV2Config(**_DEEPSEEK_V2),
    "deepseek_v3": lambda: DeepseekV3Config(**_DEEPSEEK_V3),
    "deepseek_v4": lambda: DeepseekV4Config(**deepseek_v4_fields()),
    "kimi_linear": lambda: KimiLinearConfig(**_KIMI_LINEAR),
    "qwen3_5_moe_wrapper": lambda: _wrapper_config(Qwen3_5MoeConfig, _QWEN3_5_MOE),
}

#: every family `make_tiny` knows
FAMILIES = tuple(CONFIGS)
