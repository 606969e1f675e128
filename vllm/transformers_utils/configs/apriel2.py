# SPDX-License-Identifier: Apache-2.0
"""Configs of Apriel2: a decoder described block by block, each with a token mixer of its own.

The format is Fast-LLM's. `decoder` has `num_blocks` and either one `block` for all layers (`fixed`)
or named `blocks` in a repeated `pattern`. A block's mixer is attention (with or without a window),
a recurrent mixer, or `stochastic`: several named mixers, of which `main_mixer_name` is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

Description = Mapping[str, Any]

STOCHASTIC = "stochastic"
#: types of mixers that attend to keys and values of tokens; those with a `window_size` to the last
ATTENTION_TYPES = frozenset({"attention", "sliding_window"})
_DEFAULT_EPSILON = 1e-5


class Apriel2TextConfig(PretrainedConfig):
    """Text checkpoints. `decoder`, `embeddings` and `head` are kept as they are stored."""

    model_type = "apriel2_text"

    def __init__(
        self,
        hidden_size: int = 4096,
        vocab_size: int = 32000,
        decoder: dict[str, Any] | None = None,
        embeddings: dict[str, Any] | None = None,
        head: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.decoder = decoder or {}
        self.embeddings = embeddings or {"max_position_embeddings": 2048}
        self.head = head or {}
        common: dict[str, Any] = {
            "tie_word_embeddings": tie_word_embeddings,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        super().__init__(**common, **others)

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Apriel2TextConfig:
        """The config itself: its `decoder` is a description, not a config of its own."""
        return self

    # ---- what the decoder's description says -----------------------------------------------------

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return count(self.decoder, "num_blocks", "decoder")

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the final norm."""
        return norm_epsilon(self.head, "head")

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest sequence, if stated."""
        return self.embeddings.get("max_position_embeddings")

    def block_name(self, layer: int) -> str | None:
        """What a pattern calls this layer's block; None in a fixed decoder."""
        if self.decoder.get("type", "fixed") == "fixed":
            return None
        pattern = self.decoder["pattern"]
        return str(pattern[layer % len(pattern)])

    def block(self, layer: int) -> Description:
        """A layer's `mixer`, `mlp` and `normalization`; `VLLMValidationError` if there is none."""
        kind = self.decoder.get("type", "fixed")
        if kind == "fixed":
            return _part(self.decoder, "block", "decoder")
        if kind != "pattern":
            raise _error(f"decoder.type is {kind!r}; supported: fixed, pattern")
        blocks = _part(self.decoder, "blocks", "decoder")
        if not self.decoder.get("pattern"):
            raise _error("decoder.pattern must list the name of every layer's block")
        return _part(blocks, str(self.block_name(layer)), "decoder.blocks")

    def mixers(self, layer: int) -> dict[str, Description]:
        """A layer's mixers by name, in the order of the config; a plain block's only one is "".

        `VLLMValidationError` for a stochastic mixer inside another, or without any.
        """
        mixer = _part(self.block(layer), "mixer", f"the block of layer {layer}")
        if mixer_type(mixer) != STOCHASTIC:
            return {"": mixer}
        described = optional_part(mixer, "mixers", f"the stochastic mixer of layer {layer}")
        if not described:
            raise _error(f"the stochastic mixer of layer {layer} has no mixers")
        found = {name: _part(described, name, f"the mixers of layer {layer}") for name in described}
        nested = [name for name, one in found.items() if mixer_type(one) == STOCHASTIC]
        if nested:
            raise _error(f"stochastic mixers inside a stochastic mixer: {nested} (layer {layer})")
        return found

    def main_mixer_name(self, layer: int) -> str:
        """The mixer that a layer uses unless told otherwise; "" in a plain block."""
        mixers = self.mixers(layer)
        name = str(self.block(layer)["mixer"].get("main_mixer_name") or next(iter(mixers)))
        if "" in mixers:
            return ""
        if name not in mixers:
            raise _error(f"main_mixer_name {name!r} of layer {layer} is none of {list(mixers)}")
        return name

    def choices(self) -> dict[int, tuple[str, ...]]:
        """The names of the mixers, of each layer that has several."""
        layers = ((layer, self.mixers(layer)) for layer in range(self.num_hidden_layers))
        return {layer: tuple(mixers) for layer, mixers in layers if "" not in mixers}

    def all_mixers(self) -> list[Description]:
        """Every mixer of every layer, chosen or not."""
        layers = range(self.num_hidden_layers)
        return [mixer for layer in layers for mixer in self.mixers(layer).values()]


class Apriel2Config(Apriel2TextConfig):
    """Multimodal checkpoints: the text fields stay at the top level."""

    model_type = "apriel2"

    def __init__(
        self,
        vision_encoder: dict[str, Any] | None = None,
        image_token_index: int | None = None,
        **others: Any,
    ) -> None:
        self.vision_encoder = vision_encoder
        self.image_token_index = image_token_index
        super().__init__(**others)


class Apriel2ArchConfigConvertor(ModelArchConfigConvertorBase):
    """Heads are those of the first attention mixer that any layer has, 0 without one."""

    hf_text_config: Apriel2TextConfig

    def _attention(self) -> Description:
        mixers = self.hf_text_config.all_mixers()
        return next((one for one in mixers if mixer_type(one) in ATTENTION_TYPES), {})

    def get_total_num_attention_heads(self) -> int:
        return int(self._attention().get("heads") or 0)

    def get_total_num_kv_heads(self) -> int:
        return int(self._attention().get("head_groups") or self.get_total_num_attention_heads())

    def get_head_size(self) -> int:
        return int(self._attention().get("head_size") or 0)

    def is_hybrid(self) -> bool:
        mixers = self.hf_text_config.all_mixers()
        return any(mixer_type(one) not in ATTENTION_TYPES for one in mixers)


def mixer_type(mixer: Description) -> str:
    """`type` of a mixer's description, attention if it has none."""
    return str(mixer.get("type", "attention"))


def norm_epsilon(owner: Description, where: str) -> float:
    """`normalization.epsilon` of a block, a mixer or the head; 1e-5 if it is absent.

    `VLLMValidationError` for another norm than RMS.
    """
    norm = optional_part(owner, "normalization", where)
    kind = norm.get("type", "rms_norm")
    if kind != "rms_norm":
        raise _error(f"normalization.type is {kind!r}; supported: rms_norm")
    return number(norm, "epsilon", f"{where}.normalization", _DEFAULT_EPSILON)


def optional_part(description: Description, key: str, where: str) -> Description:
    """An object, empty where it is absent or null; `VLLMValidationError` for anything else."""
    value = description.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _error(f"{where}.{key} must be an object, got {value!r}")
    return value or {}


def count(description: Description, key: str, where: str, default: int | None = None) -> int:
    """A positive integer, or the default where it is absent or null; `VLLMValidationError` for
    anything else, and without either."""
    value = description.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _error(f"{where}.{key} must be a positive number, got {value!r}")
    return value


def number(description: Description, key: str, where: str, default: float) -> float:
    """Not negative, or the default where it is absent; `VLLMValidationError` for anything else."""
    value = description.get(key, default)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise _error(f"{where}.{key} must be a number of at least 0, got {value!r}")
    return float(value)


def _part(description: Description, key: str, where: str) -> Description:
    value = description.get(key)
    if not isinstance(value, Mapping):
        raise _error(f"{where} has no {key!r} (got {value!r})")
    return value


def _error(message: str) -> VLLMValidationError:
    return VLLMValidationError(f"Apriel2 config: {message}", parameter="model")


for _class in (Apriel2TextConfig, Apriel2Config):
    MODEL_ARCH_CONFIG_CONVERTORS[_class.model_type] = Apriel2ArchConfigConvertor
    # Tokenizers are loaded by the type of the model.
    AutoConfig.register(_class.model_type, _class, exist_ok=True)
