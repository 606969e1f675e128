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
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.tiny_configs import (
    CONFIGS,
    EOS_TOKEN_ID,
    FAMILIES,
    MAX_POSITION,
    PAD_TOKEN_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
)

__all__ = [
    "EOS_TOKEN_ID",
    "FAMILIES",
    "MAX_POSITION",
    "PAD_TOKEN_ID",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "hf_model",
    "hf_reference_generate",
    "hf_reference_logits",
    "hf_residual_streams",
    "make_tiny",
    "tiny_model",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: architectures that `AutoModelForCausalLM` does not make of their config
_WRAPPERS = {
    Gemma3Config: Gemma3ForConditionalGeneration,
    Qwen3_5Config: Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig: Qwen3_5MoeForConditionalGeneration,
}

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
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
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
    if model.config.model_type == "deepseek_v4":
        _tune_deepseek_v4(model, generator)
        return
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


def _tune_deepseek_v4(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Each mechanism is seen in the logits: biases and sinks that count, mixing that is far from
    even, a table of different experts, gates beyond the clamp, attention beside them."""
    deviations = {"sinks": 0.5, "position_bias": 0.5, "base": 0.5, "fn": 0.1}
    deviations["e_score_correction_bias"] = 0.1
    for name, values in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(values.shape, generator=generator)
        last = name.rpartition(".")[2].removeprefix("hc_")
        if last in deviations:
            values.data = noise * deviations[last]
        elif last == "tid2eid":
            experts = torch.rand(len(values), model.config.n_routed_experts, generator=generator)
            values.data = experts.argsort(1)[:, : values.shape[1]]
        elif name.endswith("norm.weight"):
            values.data = torch.rand(values.shape, generator=generator) + 0.5
        elif "experts" in name and "down_proj" not in name:
            values.data *= 60
        elif "o_a_proj" in name or "o_b_proj" in name:
            values.data *= 8


def _is_one_plus(model: PreTrainedModel) -> bool:
    return any(name in model.config.model_type for name in _ONE_PLUS)


def _sharpen_attention(model: PreTrainedModel) -> None:
    """By the norms of q and k; where there are none, by what projects them."""
    has_norms = any(name.endswith(_HEAD_NORMS) for name, _ in model.named_parameters())
    for name, param in model.named_parameters():
        if name.endswith(_HEAD_NORMS):
            offset = 1.0 if _is_one_plus(model) else 0.0
            param.data = (param.data + offset) * _HEAD_NORM_GAIN - offset
        elif "gemma3" in model.config.model_type and name.endswith(
            ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
        ):
            param.data = (param.data + 1) * _BRANCH_NORM_GAIN - 1
        elif not has_norms and name.endswith(
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
    config = CONFIGS[family]()
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
    sources = [Path(__file__), Path(__file__).with_name("tiny_configs.py")]
    version = hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"vllm-tiny-models-{getpass.getuser()}" / version


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Path:
    """The checkpoint of a family, made once per machine and version of these files."""
    target = _cache_root() / f"{family}-{str(dtype).removeprefix('torch.')}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{family}-"))
    with torch.random.fork_rng(devices=[]):  # a test draws the same numbers when it is made
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
    """Logits `[len(token_ids), vocab]` of one sequence in one pass. They are shared: each way to
    run an engine is compared with the same ones."""
    return _reference_logits(str(path), tuple(token_ids), dtype)


@lru_cache(maxsize=256)
def _reference_logits(path: str, token_ids: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    logits: Tensor = hf_model(path, dtype)(torch.tensor([token_ids])).logits[0]
    return logits


def hf_reference_generate(
    path: str | Path, token_ids: list[int], max_tokens: int, dtype: torch.dtype = torch.float32
) -> list[int]:
    """`max_tokens` greedy tokens, end-of-sequence ignored; each from a full pass."""
    return list(_reference_tokens(str(path), tuple(token_ids), max_tokens, dtype))


@lru_cache(maxsize=256)
@torch.no_grad()
def _reference_tokens(
    path: str, token_ids: tuple[int, ...], max_tokens: int, dtype: torch.dtype
) -> tuple[int, ...]:
    model, ids = hf_model(path, dtype), list(token_ids)
    for _ in range(max_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(token_ids) :])


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
