# SPDX-License-Identifier: Apache-2.0
"""The few numbers the engine needs from a model config, whatever the family calls them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from vllm.exceptions import VLLMValidationError

#: entries of `layer_types` (or of older spellings of it) that keep a recurrent state
RECURRENT_LAYER_TYPES = frozenset(
    {"linear_attention", "mamba", "mamba2", "ssm", "recurrent", "gdn", "kda", "short_conv", "conv"}
)
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
#: say how many experts a mixture routes to
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: rope types whose `max_position_embeddings` is already the scaled length
_ROPE_ALREADY_SCALED = frozenset({"default", "llama3", "longrope", "su", "proportional", "mrope"})


@dataclass(frozen=True)
class ModelArchConfig:
    """Sizes of the text decoder. `max_model_len` 0: the config states no limit. With `use_mla` a
    token's one key/value head is its latent and the key dimensions that heads share."""

    architectures: tuple[str, ...]
    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    max_model_len_key: str
    is_hybrid: bool
    use_mla: bool = False
    has_experts: bool = False


class ModelArchConfigConvertorBase:
    """Reads a config with the usual names; a family with others overrides a method."""

    def __init__(self, hf_config: PretrainedConfig, hf_text_config: PretrainedConfig) -> None:
        self.hf_config = hf_config
        self.hf_text_config = hf_text_config

    def _first(self, names: Iterable[str], default: Any = None) -> Any:
        for name in names:
            value = getattr(self.hf_text_config, name, None)
            if value is not None:
                return value
        return default

    def _required(self, *names: str) -> int:
        return self._size(names, self._first(names))

    def _size(self, names: Iterable[str], value: Any) -> int:
        if not isinstance(value, int) or value < 1:
            raise VLLMValidationError(
                f"the model config has no usable {' or '.join(names)} (got {value!r})",
                parameter="model",
            )
        return value

    def get_architectures(self) -> list[str]:
        names = self.hf_config.architectures or []
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise VLLMValidationError(
                f"architectures {names!r} of the model config must be a list of names", "model"
            )
        return list(names)

    def get_num_hidden_layers(self) -> int:
        return self._required("num_hidden_layers", "n_layer", "num_layers")

    def get_total_num_attention_heads(self) -> int:
        return self._required("num_attention_heads", "n_head")

    def use_mla(self) -> bool:
        """Whether attention keeps a compressed latent."""
        return self._first(("kv_lora_rank",)) is not None

    def get_total_num_kv_heads(self) -> int:
        if self.use_mla():
            return 1
        names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        heads = self._first(names)
        if not isinstance(heads, int):
            return self.get_total_num_attention_heads()
        return self._size(names, heads)

    def get_hidden_size(self) -> int:
        return self._required("hidden_size", "n_embd", "d_model")

    def get_head_size(self) -> int:
        if self.use_mla():
            return self._required("kv_lora_rank") + self._required("qk_rope_head_dim")
        names = ("head_dim", "hidden_size_per_head")
        size = self._first(names)
        if isinstance(size, int):
            return self._size(names, size)
        return self.get_hidden_size() // self.get_total_num_attention_heads()

    def get_vocab_size(self) -> int:
        return self._required("vocab_size")

    def layer_types(self) -> list[str]:
        """Kind of each decoder layer; empty when all are alike."""
        return list(self._first(("layer_types", "layers_block_type"), ()))

    def is_hybrid(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return any(kind in RECURRENT_LAYER_TYPES for kind in self.layer_types())

    def has_experts(self) -> bool:
        """Whether some layer may be a mixture of experts."""
        return any(self._first((key,)) for key in EXPERTS_KEYS)

    def derive_max_model_len_and_key(self) -> tuple[int, str]:
        """`(tokens, config key)`: the longest sequence the positions were made for, 0 if unstated.

        YaRN's limit is `original_max_position_embeddings * factor` (arXiv 2309.00071, section 3.4);
        linear and dynamic scaling multiply the stated length by their factor.
        """
        key = next((name for name in _LENGTH_KEYS if self._first((name,)) is not None), "")
        if not key:
            return 0, ""
        length = self._required(key)
        rope = self._first(("rope_parameters", "rope_scaling"), {})
        kind = rope.get("rope_type", rope.get("type", "default")) if rope else "default"
        factor = rope.get("factor", 1.0) if rope else 1.0
        if kind in _ROPE_ALREADY_SCALED or not isinstance(factor, int | float):
            return length, key
        original = rope.get("original_max_position_embeddings")
        if kind == "yarn" and original:
            return max(length, int(original * factor)), key
        return int(length * factor), key

    def convert(self) -> ModelArchConfig:
        """All of it; raises `VLLMValidationError` naming a size that is missing."""
        length, key = self.derive_max_model_len_and_key()
        return ModelArchConfig(
            architectures=tuple(self.get_architectures()),
            model_type=self.hf_config.model_type,
            num_hidden_layers=self.get_num_hidden_layers(),
            num_attention_heads=self.get_total_num_attention_heads(),
            num_kv_heads=self.get_total_num_kv_heads(),
            head_size=self.get_head_size(),
            hidden_size=self.get_hidden_size(),
            vocab_size=self.get_vocab_size(),
            max_model_len=length,
            max_model_len_key=key,
            is_hybrid=self.is_hybrid(),
            use_mla=self.use_mla(),
            has_experts=self.has_experts(),
        )


class _MixturesAreLayers(ModelArchConfigConvertorBase):
    """The list of layers names mixtures; how many experts they have is stated without any, too."""

    def has_experts(self) -> bool:
        return "moe" in self.layer_types()


#: model_type -> convertor; plugins add theirs
MODEL_ARCH_CONFIG_CONVERTORS: dict[str, type[ModelArchConfigConvertorBase]] = {
    "nemotron_h": _MixturesAreLayers
}


def convert(hf_config: PretrainedConfig, hf_text_config: PretrainedConfig) -> ModelArchConfig:
    """The sizes of a model, through its family's convertor."""
    cls = MODEL_ARCH_CONFIG_CONVERTORS.get(hf_config.model_type, ModelArchConfigConvertorBase)
    return cls(hf_config, hf_text_config).convert()
