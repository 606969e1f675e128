# SPDX-License-Identifier: Apache-2.0
"""Apriel2 (arXiv 2604.19877): every layer has a token mixer of its own, behind Llama's frame."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.host_weights import send_to_host
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.models.apriel2_mixers import (
    MIXERS,
    Apriel2Mixer,
    StochasticMixer,
    has_biases,
    mixer_class,
    only_silu,
    unsupported,
)
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.models.weights import Weights, WeightsError, WeightsMapper
from vllm.model_executor.placements import (
    NO_SUPERNET,
    Placement,
    check_names,
    expand,
    is_short_form,
    placement_error,
)
from vllm.transformers_utils.configs.apriel2 import (
    ATTENTION_TYPES,
    Apriel2TextConfig,
    Description,
    count,
    mixer_type,
    norm_epsilon,
    optional_part,
)

#: where tensors go whose mixer is not part of the model
_UNSELECTED = "unselected_mixers."


class Apriel2DecoderLayer(DecoderLayer):
    """A mixer and a gated MLP, as the layer's block describes them."""

    mixer: Apriel2Mixer

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Apriel2TextConfig = vllm_config.model_config.hf_text_config
        index = extract_layer_index(prefix)
        block = config.block(index)
        eps = norm_epsilon(block, prefix)
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.mixer = _new_mixer(config, index, vllm_config, f"{prefix}.mixer")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.mlp = _new_mlp(optional_part(block, "mlp", prefix), vllm_config, f"{prefix}.mlp")

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.mixer.after_norm(self.input_layernorm, positions, stream)


def _new_mixer(
    config: Apriel2TextConfig, layer: int, vllm_config: VllmConfig, prefix: str
) -> Apriel2Mixer:
    mixers = config.mixers(layer)
    if "" in mixers:
        return mixer_class(mixers[""], prefix)(mixers[""], vllm_config, prefix)
    main = config.main_mixer_name(layer)
    stochastic, live = StochasticMixer(mixers, vllm_config, prefix, main), {main}
    model = vllm_config.model_config
    if model.placement is not None:
        live = {expand(model.placement, config.num_hidden_layers)[layer]}
    for placement in model.placement_aliases.values():
        live.add(expand(placement, config.num_hidden_layers)[layer])
    for name, mixer in stochastic.mixers.items():
        if name not in live:
            # Layer by layer, so that the device never has to hold all of them.
            send_to_host(mixer)
    return stochastic


def _new_mlp(mlp: Description, vllm_config: VllmConfig, prefix: str) -> GatedMLP:
    if mlp.get("type", "mlp") != "mlp":
        raise unsupported(prefix, f"type {mlp['type']!r}", "mlp")
    if not mlp.get("gated", True):
        raise unsupported(prefix, "an MLP without gate", "gated: true")
    only_silu(mlp, prefix, "activation")
    parts = [(part, optional_part(mlp, part, prefix)) for part in ("layer_1", "layer_2")]
    enabled = any(
        optional_part(layer, "bias", f"{prefix}.{part}").get("enabled") for part, layer in parts
    )
    if enabled or mlp.get("add_linear_biases"):
        raise unsupported(prefix, "a gated MLP with biases", "one without")
    return GatedMLP(
        vllm_config.model_config.hf_text_config.hidden_size,
        count(mlp, "intermediate_size", prefix),
        prefix=prefix,
        quant_config=vllm_config.quant_config,
    )


class Apriel2ForCausalLM(DecoderForCausalLM, HasPlacements):
    """Plain checkpoints, supernets, and supernets of which the config has some of the mixers of a
    layer, or a pattern takes one, that its block's name names. Multimodal ones are served as
    text."""

    layer_class = Apriel2DecoderLayer
    fused_names = (
        *DecoderForCausalLM.fused_names[3:],
        *dict.fromkeys(name for mixer in MIXERS.values() for name in mixer.fused_names),
    )
    unused_weights = {
        "model.vision_encoder.": "only text is served",
        _UNSELECTED: "the config has other mixers of this supernet",
    }

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> None:
        _check_request_placements(vllm_config.model_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
        if vllm_config.model_config.placement is not None:
            self.set_layer_placements(vllm_config.model_config.placement)

    def names_in(self, config: PretrainedConfig) -> WeightsMapper:
        return _names_in(cast(Apriel2TextConfig, config))

    def _supernet_layers(self) -> dict[int, StochasticMixer]:
        return {
            i: layer.mixer
            for i, layer in enumerate(self.model.layers)
            if isinstance(layer, Apriel2DecoderLayer) and isinstance(layer.mixer, StochasticMixer)
        }

    def get_layer_mixers(self) -> dict[int, tuple[str, ...]]:
        return {i: tuple(layer.mixers) for i, layer in self._supernet_layers().items()}

    def get_layer_placements(self) -> dict[int, str]:
        return {i: layer.active for i, layer in self._supernet_layers().items()}

    def set_layer_placements(self, placement: Placement) -> dict[int, str]:
        names = self._checked(placement)
        for i, layer in self._supernet_layers().items():
            layer.active = names[i]
        return self.get_layer_placements()

    def spell(self, placement: Mapping[int, str] | Placement) -> str:
        layers = self._supernet_layers()
        if isinstance(placement, Mapping):
            names = dict(placement)
        else:
            names = dict(enumerate(self._checked(placement)))
        return ",".join(
            names[i] if i in layers else "_" for i in range(self.config.num_hidden_layers)
        )

    def get_mixers(self) -> list[nn.Module]:
        return [
            mixer for layer in self._supernet_layers().values() for mixer in layer.mixers.values()
        ]

    def get_used_mixers(self) -> dict[int, nn.Module]:
        return {i: layer.mixers[layer.active] for i, layer in self._supernet_layers().items()}

    def unused_mixers(self, *placements: Placement) -> list[nn.Module]:
        chosen: list[dict[int, str]] = [dict(enumerate(self._checked(one))) for one in placements]
        chosen = chosen or [self.get_layer_placements()]
        return [
            mixer
            for i, layer in self._supernet_layers().items()
            for name, mixer in layer.mixers.items()
            if all(name != names[i] for names in chosen)
        ]

    def _checked(self, placement: Placement) -> list[str]:
        if not self._supernet_layers():
            raise placement_error(NO_SUPERNET)
        names = expand(placement, self.config.num_hidden_layers)
        check_names(names, self.get_layer_mixers())
        return names

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As the base. Biases that the config switches off beside others are zero."""
        absent = dict(_absent_biases(self.config))
        return super().load_weights(chain(_without(weights, absent), absent.items()))


def _check_request_placements(model: ModelConfig) -> None:
    """`VLLMValidationError` that names the alias of a placement that there is not, or of one while
    another has its name, and for room for placements of what is no supernet."""
    config = cast(Apriel2TextConfig, model.hf_text_config)
    num_layers, choices = config.num_hidden_layers, config.choices()
    if model.max_request_placements is not None and not choices:
        raise VLLMValidationError(
            f"--max-request-placements: {NO_SUPERNET}; leave it out",
            "max_request_placements",
            model.max_request_placements,
        )
    for name, placement in model.placement_aliases.items():
        try:
            if not choices:
                raise placement_error(NO_SUPERNET)
            names = expand(placement, num_layers)
            check_names(names, choices)
            if is_short_form(name) and expand(name, num_layers) != names:
                raise placement_error(
                    f"{name!r} has the form of another placement; choose another name"
                )
        except VLLMValidationError as error:
            raise VLLMValidationError(
                f"--placement-alias {name}={placement}: {error}", "placement_alias"
            ) from None


def _names_in(config: Apriel2TextConfig) -> WeightsMapper:
    """From the checkpoint's names to the model's, layer by layer."""
    prefixes: dict[str, str | None] = {}
    for layer in range(config.num_hidden_layers):
        stored, ours = f"model.decoder.blocks.{layer}.", f"model.layers.{layer}."
        mixers = config.mixers(layer)
        block = config.block_name(layer)
        others = {f"{stored}mixer.mixers.": f"{_UNSELECTED}{layer}."}
        if "" in mixers and block is not None:
            # A supernet's tensors: those of the mixer that the block is named for are this one's.
            prefixes |= _mixer_names(f"{stored}mixer.mixers.{block}.", f"{ours}mixer.", mixers[""])
            prefixes |= others
        for name, mixer in mixers.items():
            inner = f"mixers.{name}." if name else ""
            prefixes |= _mixer_names(f"{stored}mixer.{inner}", f"{ours}mixer.{inner}", mixer)
        if "" not in mixers:
            prefixes |= others
        prefixes[stored] = ours
    return WeightsMapper(orig_to_new_prefix=prefixes)


def _mixer_names(stored: str, ours: str, mixer: Description) -> dict[str, str | None]:
    renamed = mixer_class(mixer, stored).renamed
    names: dict[str, str | None] = {f"{stored}{k}.": f"{ours}{v}." for k, v in renamed.items()}
    return {**names, stored: ours}


def _absent_biases(config: Apriel2TextConfig) -> Iterator[tuple[str, Tensor]]:
    """Biases, under the checkpoint's names, of projections that have none although others of the
    same fused matrix do."""
    for layer in range(config.num_hidden_layers):
        for name, mixer in config.mixers(layer).items():
            if mixer_type(mixer) not in ATTENTION_TYPES:
                continue
            enabled = has_biases(mixer, f"layers.{layer}.mixer")[:3]
            if not any(enabled):
                continue
            inner = f"mixers.{name}." if name else ""
            groups = mixer.get("head_groups") or mixer["heads"]
            for part, heads, has in zip(
                "qkv", (mixer["heads"], groups, groups), enabled, strict=True
            ):
                if not has:
                    path = f"model.decoder.blocks.{layer}.mixer.{inner}{part}_proj.bias"
                    yield path, torch.zeros(heads * mixer["head_size"])


def _without(weights: Weights, absent: dict[str, Tensor]) -> Weights:
    """Pass the tensors on; WeightsError for one that the config says is absent."""
    for name, tensor in weights:
        if name in absent:
            raise WeightsError([f"surplus: {name}: the config switches this bias off"])
        yield name, tensor
