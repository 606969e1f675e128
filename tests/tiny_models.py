# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of every family, with weights tuned so that state bugs change tokens.

With default initialisation a model whose recurrent state is zeroed at every step still picks the
same greedy tokens, and greedy text repeats one token. Here the projections into a mixer and the
convolutions are scaled by 4, those out of a branch by 6, norms are perturbed and decays lie near 1,
so that every part of the state matters; embeddings are scaled by 25 and attention is made sharp,
so that the text depends on the prompt.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
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

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

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


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama3_rope": lambda: LlamaConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        rope_parameters=_LLAMA3_ROPE,
        attention_bias=True,
        mlp_bias=True,
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
    "kimi_linear": lambda: KimiLinearConfig(**_KIMI_LINEAR),
    "qwen3_5_moe_wrapper": lambda: _wrapper_config(Qwen3_5MoeConfig, _QWEN3_5_MOE),
}

#: architectures that `AutoModelForCausalLM` does not make of their config
_WRAPPERS = {
    Gemma3Config: Gemma3ForConditionalGeneration,
    Qwen3_5Config: Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig: Qwen3_5MoeForConditionalGeneration,
}

#: every family `make_tiny` knows
FAMILIES = tuple(_CONFIGS)

#: name part -> factor on the weights, first match
_SCALES = {
    "visual": 1.0,
    "vision_tower": 1.0,
    "multi_modal_projector": 1.0,
    "embed_tokens": 25.0,
    "embeddings": 25.0,
    "lm_head": 4.0,
    "in_proj": 4.0,
    "linear_attn.g_proj": 4.0,
    "linear_attn.a_proj": 4.0,
    "linear_attn.b_proj": 4.0,
    "conv1d": 4.0,
    "q_proj": 4.0,
    "k_proj": 4.0,
    "v_proj": 4.0,
    "o_proj": 6.0,
    "out_proj": 6.0,
    "mixer.up_proj": 8.0,
    "mixer.experts.up_proj": 10.0,
    "mixer.shared_experts.up_proj": 8.0,
    "mixer.gate.": 10.0,
    "feed_forward.gate_proj": 6.0,
    "feed_forward.up_proj": 6.0,
    "shared_mlp.input_linear": 6.0,
    "shared_mlp.output_linear": 6.0,
    "block_sparse_moe.router": 10.0,
    "experts.gate_up_proj": 6.0,
    "experts.down_proj": 12.0,
    "mlp.gate.": 10.0,
    "mlp.router.": 10.0,
    "shared_expert_gate": 10.0,
    "shared_expert.gate_proj": 6.0,
    "shared_expert.up_proj": 6.0,
    "shared_experts.gate_proj": 6.0,
    "shared_experts.up_proj": 6.0,
    "q_a_proj": 4.0,
    "q_b_proj": 4.0,
    "kv_a_proj": 8.0,
    "kv_b_proj": 8.0,
    "f_a_proj": 4.0,
    "f_b_proj": 4.0,
    "g_a_proj": 4.0,
    "g_b_proj": 4.0,
    "down_proj": 6.0,
}
# Sharper attention makes text depend more on the prompt, but amplifies bf16 rounding.
_LLAMA_SHARPNESS = 3.0
_WITHOUT_HEAD_NORMS = (
    *("llama", "mixtral", "kimi_linear", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    *("nemotron_h", "granitemoehybrid", "falcon_h1", "bamba"),
)
_HEAD_NORM_GAIN = 2.0
#: of norms of branches beside embeddings that the model scales up
_BRANCH_NORM_GAIN = 4.0
_ONE_PLUS = ("qwen3_5", "qwen3_next", "gemma3")
_OF_IMAGES = ("visual", "vision_tower", "multi_modal_projector")
_TIED_HEAD_GAIN = 0.2
#: what models call their final norm
_FINAL_NORMS = ("norm", "norm_f", "final_layernorm")


def _tune(model: PreTrainedModel) -> None:
    """See the module docstring; in place."""
    generator = torch.Generator().manual_seed(1)
    for name, param in model.named_parameters():
        uniform = torch.rand(param.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            param.data = uniform * 2 - 3
            continue
        param.data *= next((scale for part, scale in _SCALES.items() if part in name), 1.0)
        if param.dim() == 1 and not any(part in name for part in _OF_IMAGES):
            param.data += (uniform * 2 - 1) * 0.3
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.6 - 0.3)
    if model.config.model_type == "gpt_oss":
        _tune_gpt_oss(model, generator)
    _sharpen_attention(model)
    if model.config.tie_word_embeddings:
        _decorrelate_head(model)


def _tune_gpt_oss(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Sinks that take a good part of the attention, biases that count, gates beyond the clamp."""
    for name, param in model.named_parameters():
        uniform = torch.rand(param.shape, generator=generator) * 2 - 1
        if name.endswith("sinks"):
            param.data = 2 + 3 * uniform
        elif name.endswith("_proj_bias"):
            param.data = 2 * uniform
        elif name.endswith("experts.gate_up_proj"):
            param.data *= 4


def _is_one_plus(model: PreTrainedModel) -> bool:
    return any(name in model.config.model_type for name in _ONE_PLUS)


def _sharpen_attention(model: PreTrainedModel) -> None:
    for name, param in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            offset = 1.0 if _is_one_plus(model) else 0.0
            param.data = (param.data + offset) * _HEAD_NORM_GAIN - offset
        elif "gemma3" in model.config.model_type and name.endswith(
            ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
        ):
            param.data = (param.data + 1) * _BRANCH_NORM_GAIN - 1
        elif model.config.model_type in _WITHOUT_HEAD_NORMS and name.endswith(
            ("q_proj.weight", "q_b_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
        ):
            param.data *= _LLAMA_SHARPNESS


def _decorrelate_head(model: PreTrainedModel) -> None:
    """Random signs in the final norm: a tied head would otherwise repeat the last token.

    The gain undoes the embedding's scale, so that logits are as wide as an untied head's.
    """
    decoder = model.get_decoder()
    norm = getattr(decoder, "language_model", decoder).norm
    signs = _TIED_HEAD_GAIN * (torch.randint(0, 2, norm.weight.shape) * 2 - 1)
    offset = 1.0 if _is_one_plus(model) else 0.0
    norm.weight.data = (norm.weight.data + offset) * signs - offset


def _new_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel
    if type(config) in _WRAPPERS:
        model = _WRAPPERS[type(config)](config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    return model


def make_tiny(
    family: str, path: str | Path, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Save a checkpoint with tokenizer and chat template in `path`; returns it.

    `overrides` replace fields of the (text) config. Raises KeyError for an unknown family.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[family]()
    text_config = config.get_text_config()
    for key, value in overrides.items():
        setattr(text_config, key, value)
    model = _new_model(config)
    _tune(model)
    model = model.to(dtype=dtype).eval()
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.save_pretrained(path)
    if family.startswith("qwen") and type(config) in _WRAPPERS:
        _add_mtp_tensors(path / "model.safetensors", text_config, dtype)
    if family == "olmo_hybrid":
        _cut_convolutions(path / "model.safetensors", text_config)
    _tokenizer().save_pretrained(path)
    return path


def _add_mtp_tensors(file: Path, config: Any, dtype: torch.dtype) -> None:
    """Released checkpoints carry a multi-token-prediction head that transformers does not save."""
    tensors = load_file(file)
    hidden = config.hidden_size
    tensors["mtp.fc.weight"] = torch.zeros(hidden, 2 * hidden, dtype=dtype)
    tensors["mtp.norm.weight"] = torch.zeros(hidden, dtype=dtype)
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.zeros(hidden, dtype=dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def _cut_convolutions(file: Path, config: Any) -> None:
    """Released checkpoints have one convolution each for q, k and v; transformers, which has one
    for all, saves it in parts of equal size."""
    tensors = load_file(file)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for layer in range(config.num_hidden_layers):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        if names[0] in tensors:
            whole = torch.cat([tensors[name] for name in names])
            parts = whole.split([keys, keys, values])
            tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges: one token per UTF-8 byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _cache_root() -> Path:
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"vllm-tiny-models-{getpass.getuser()}" / version


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Path:
    """The checkpoint of a family, made once per machine and version of this file."""
    target = _cache_root() / f"{family}-{str(dtype).removeprefix('torch.')}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{family}-"))
    make_tiny(family, scratch, dtype)
    try:
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(scratch)
    return target


@lru_cache(maxsize=4)
def hf_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The transformers model of a checkpoint."""
    architecture: Any = AutoModelForCausalLM
    (name,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
    for wrapper in _WRAPPERS.values():
        if wrapper.__name__ == name:
            architecture = wrapper
    model: PreTrainedModel = architecture.from_pretrained(path, dtype=dtype).eval()
    return model


@torch.no_grad()
def hf_reference_logits(
    path: str | Path, token_ids: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits `[len(token_ids), vocab]` of one sequence in one pass."""
    logits: Tensor = hf_model(path, dtype)(torch.tensor([token_ids])).logits[0]
    return logits


@torch.no_grad()
def hf_reference_generate(
    path: str | Path, token_ids: list[int], max_tokens: int, dtype: torch.dtype = torch.float32
) -> list[int]:
    """`max_tokens` greedy tokens, end-of-sequence ignored; each from a full pass."""
    ids = list(token_ids)
    for _ in range(max_tokens):
        ids.append(int(hf_reference_logits(path, ids, dtype)[-1].argmax()))
    return ids[len(token_ids) :]


@torch.no_grad()
def hf_residual_streams(
    path: str | Path, token_ids: list[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """`[tokens, hidden]` after 0, 1, ... layers; the last one is before the final norm."""
    model = hf_model(path, dtype)
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    streams: list[Tensor] = []

    def keep(_: Any, inputs: tuple[Any, ...]) -> None:
        streams.append(inputs[0][0].clone())

    norm = next(m for name in _FINAL_NORMS if (m := getattr(decoder, name, None)) is not None)
    hooked = [*decoder.layers, norm]
    handles = [module.register_forward_pre_hook(keep) for module in hooked]
    try:
        model(torch.tensor([token_ids]))
    finally:
        for handle in handles:
            handle.remove()
    return streams
