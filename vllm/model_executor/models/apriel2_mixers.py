# SPDX-License-Identifier: Apache-2.0
"""The token mixers of Apriel2, made from their descriptions in a config.

Each is a layer of the library under the checkpoint's names, with one call for all kinds.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetShape
from vllm.model_executor.layers.grouped_mamba import GroupedMamba, GroupedMambaShape
from vllm.model_executor.layers.kimi_delta_attention import (
    KimiDeltaAttention,
    KimiDeltaAttentionShape,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import NEEDED, get_rope
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models.weights import FusedName
from vllm.transformers_utils.configs.apriel2 import (
    Description,
    count,
    mixer_type,
    norm_epsilon,
    number,
    optional_part,
)
from vllm.utils.math_utils import cdiv

#: entries of Fast-LLM's rotary configs -> those of transformers
_ROTARY_NAMES = {
    "theta": "rope_theta",
    "scale_factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context_length": "original_max_position_embeddings",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_ROTARY_TYPES = {
    "mistral_1d": "default",
    "default": "default",
    "llama3": "llama3",
    "yarn": "yarn",
}
_PROJECTIONS = ("query_layer", "key_layer", "value_layer", "dense_layer")


class Apriel2Mixer:
    """What a decoder layer needs of its mixer."""

    #: the checkpoint's path components -> the layer's, where they differ
    renamed: ClassVar[Mapping[str, str]] = {}
    #: see `AutoWeightsLoader`
    fused_names: ClassVar[tuple[FusedName, ...]] = ()

    @abstractmethod
    def __init__(self, mixer: Description, vllm_config: VllmConfig, prefix: str) -> None:
        """`mixer`: its description. Raises `VLLMValidationError` for what is not supported."""

    @abstractmethod
    def after_norm(
        self, norm: RMSNorm, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        """The stream, added up, with this mixer of its norm as a branch; and its sum."""


class Apriel2Attention(SelfAttention, Apriel2Mixer):
    """Rotary attention, with a window if the description has one."""

    fused_names = (
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
    )

    def __init__(self, mixer: Description, vllm_config: VllmConfig, prefix: str) -> None:
        model = vllm_config.model_config
        if not mixer.get("causal", True):
            raise unsupported(prefix, "attention that is not causal", "causal attention")
        window = mixer.get("window_size")
        if mixer_type(mixer) == "sliding_window" and window is None:
            raise unsupported(prefix, "a sliding_window mixer without window_size", "one with it")
        if window is not None:
            window = count(mixer, "window_size", prefix)
        query, key, value, dense = has_biases(mixer, prefix)
        heads = count(mixer, "heads", prefix)
        shape = SelfAttentionShape(
            hidden_size=model.hf_text_config.hidden_size,
            num_heads=heads,
            num_kv_heads=count(mixer, "head_groups", prefix, heads),
            head_dim=count(mixer, "head_size", prefix),
            qkv_bias=query or key or value,
            o_bias=dense,
            sliding_window=window,
        )
        rope = get_rope(
            shape.head_dim, model.max_model_len, rope_parameters=rope_parameters(mixer, prefix)
        )
        super().__init__(shape, rope, prefix, vllm_config.quant_config)


class Apriel2GatedDeltaNet(GatedDeltaNet, Apriel2Mixer):
    """A gated delta net whose checkpoint has q, k, v and z one after the other, and b and a."""

    renamed: ClassVar[Mapping[str, str]] = {"convolution": "conv1d"}
    fused_names = (
        ("in_proj_ba", "in_proj_ba", (0, 1)),
        ("in_proj", "in_proj_ba", (4, 5)),
        ("in_proj", "in_proj_qkvz", (0, 1, 2, 3)),
    )

    def __init__(self, mixer: Description, vllm_config: VllmConfig, prefix: str) -> None:
        convolution = optional_part(mixer, "convolution_layer", prefix)
        only_silu(convolution, prefix, "convolution_layer")
        shape = GatedDeltaNetShape(
            hidden_size=vllm_config.model_config.hf_text_config.hidden_size,
            num_k_heads=count(mixer, "key_heads", prefix),
            num_v_heads=count(mixer, "value_heads", prefix),
            head_k_dim=count(mixer, "key_head_dim", prefix),
            head_v_dim=count(mixer, "value_head_dim", prefix),
            conv_kernel_size=count(convolution, "kernel_size", f"{prefix}.convolution_layer"),
            eps=number(mixer, "norm_eps", prefix, 1e-5),
        )
        super().__init__(shape, prefix, quant_config=vllm_config.quant_config)


class Apriel2KimiDeltaAttention(KimiDeltaAttention, Apriel2Mixer):
    """Kimi delta attention, by default with gates of SiLU."""

    renamed: ClassVar[Mapping[str, str]] = {
        "beta_proj": "b_proj",
        "q_conv": "q_conv1d",
        "k_conv": "k_conv1d",
        "v_conv": "v_conv1d",
        "norm": "o_norm",
    }
    fused_names = KimiDeltaAttention.CHECKPOINT_NAMES

    def __init__(self, mixer: Description, vllm_config: VllmConfig, prefix: str) -> None:
        convolution = optional_part(mixer, "convolution_layer", prefix)
        only_silu(convolution, prefix, "convolution_layer")
        norm = optional_part(mixer, "normalization", prefix)
        shape = KimiDeltaAttentionShape(
            hidden_size=vllm_config.model_config.hf_text_config.hidden_size,
            num_heads=count(mixer, "heads", prefix),
            head_dim=count(mixer, "head_dim", prefix),
            conv_kernel_size=count(convolution, "kernel_size", f"{prefix}.convolution_layer", 4),
            eps=norm_epsilon(mixer, prefix),
            gate_activation=norm.get("activation", "silu"),
        )
        super().__init__(shape, prefix, quant_config=vllm_config.quant_config)


class Apriel2Mamba(GroupedMamba, Apriel2Mixer):
    """Mamba with shared x and B."""

    def __init__(self, mixer: Description, vllm_config: VllmConfig, prefix: str) -> None:
        hidden = vllm_config.model_config.hf_text_config.hidden_size
        size = count(mixer, "state_size", prefix, 16)
        if mixer.get("d_state", size) != size:
            # The models' own code reads state_size alone.
            other = f"d_state {mixer['d_state']} beside state_size {size}"
            raise unsupported(prefix, other, "state_size, or both alike")
        rank = mixer.get("dt_rank", "auto")
        if mixer.get("d_inner") is None:
            inner = int(number(mixer, "expand", prefix, 2.0) * hidden)
        else:
            inner = count(mixer, "d_inner", prefix)
        shape = GroupedMambaShape(
            hidden_size=hidden,
            inner=inner,
            shared=count(mixer, "d_xb", prefix, hidden),
            state_size=size,
            dt_rank=cdiv(hidden, 16) if rank == "auto" else count(mixer, "dt_rank", prefix),
            conv_kernel_size=count(mixer, "d_conv", prefix, 4),
            conv_bias=flag(mixer, "conv_bias", prefix),
            dt_bias=flag(mixer, "dt_proj_bias", prefix),
            proj_bias=bool(mixer.get("add_linear_biases", False)),
            repeats_first=bool(mixer.get("repeat_kv_before_conv", True)),
        )
        super().__init__(shape, prefix, quant_config=vllm_config.quant_config)


#: type in a description -> what is built of it
MIXERS: dict[str, type[Any]] = {
    "attention": Apriel2Attention,
    "sliding_window": Apriel2Attention,
    "gdn": Apriel2GatedDeltaNet,
    "kda": Apriel2KimiDeltaAttention,
    "mamba": Apriel2Mamba,
}


class StochasticMixer(nn.Module, Apriel2Mixer):
    """Several mixers of one layer of a supernet, by name; steps run the one that is `active`."""

    def __init__(
        self, mixers: Mapping[str, Description], vllm_config: VllmConfig, prefix: str, active: str
    ) -> None:
        super().__init__()
        dotted = [name for name in mixers if "." in name]
        if dotted:
            raise unsupported(prefix, f"a mixer named {dotted[0]!r}", "names without dots")
        self.mixers = nn.ModuleDict(
            {
                name: mixer_class(mixer, prefix)(mixer, vllm_config, f"{prefix}.mixers.{name}")
                for name, mixer in mixers.items()
            }
        )
        self.active = active

    def after_norm(
        self, norm: RMSNorm, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        mixer = self.mixers[self.active]
        assert isinstance(mixer, Apriel2Mixer)
        return mixer.after_norm(norm, positions, stream)


def mixer_class(mixer: Description, prefix: str) -> type[Any]:
    """The `Apriel2Mixer` of a description; `VLLMValidationError` for an unknown type."""
    kind = mixer_type(mixer)
    if kind not in MIXERS:
        raise unsupported(prefix, f"a mixer of type {kind!r}", ", ".join(MIXERS))
    return MIXERS[kind]


def has_biases(mixer: Description, prefix: str) -> tuple[bool, bool, bool, bool]:
    """Whether attention's q, k, v and output projections have biases."""
    default = bool(mixer.get("add_linear_biases", False))

    def has(part: str) -> bool:
        layer = optional_part(mixer, part, prefix)
        enabled = optional_part(layer, "bias", f"{prefix}.{part}").get("enabled")
        return default if enabled is None else bool(enabled)

    query, key, value, dense = (has(part) for part in _PROJECTIONS)
    return query, key, value, dense


def rope_parameters(mixer: Description, prefix: str) -> dict[str, Any]:
    """A description's `rotary`, in transformers' words."""
    rotary = optional_part(mixer, "rotary", prefix)
    kind = str(rotary.get("type", "mistral_1d"))
    if kind not in _ROTARY_TYPES:
        raise unsupported(prefix, f"rotary.type {kind!r}", ", ".join(_ROTARY_TYPES))
    if rotary.get("theta") is None or not number(rotary, "theta", f"{prefix}.rotary", 0.0):
        raise unsupported(prefix, "rotary without theta", "a number")
    known = {
        _ROTARY_NAMES[name]: value
        for name, value in rotary.items()
        if name in _ROTARY_NAMES and value is not None
    }
    needed = NEEDED[_ROTARY_TYPES[kind]]
    missing = [name for name, ours in _ROTARY_NAMES.items() if ours in needed and ours not in known]
    if missing:
        raise unsupported(prefix, f"rotary {kind!r} without {', '.join(missing)}", "numbers")
    return {"rope_type": _ROTARY_TYPES[kind], **known}


def flag(description: Description, key: str, where: str) -> bool:
    """A choice that must be given; `VLLMValidationError` without it."""
    value = description.get(key)
    if not isinstance(value, bool):
        raise unsupported(where, f"{key} {value!r}", "true, false")
    return value


def only_silu(part: Description, prefix: str, name: str) -> None:
    """`VLLMValidationError` for another activation."""
    activation = part.get("activation", "silu")
    if activation != "silu":
        raise unsupported(f"{prefix}.{name}", f"activation {activation!r}", "silu")


def unsupported(where: str, what: str, instead: str) -> VLLMValidationError:
    return VLLMValidationError(f"{where}: {what} is not supported; supported: {instead}", "model")
