# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, experts with biases."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.moe import ClampedSwiglu
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.quantization.mxfp4 import METHOD as MXFP4
from vllm.model_executor.layers.quantization.mxfp4 import dequantised, record_dequantised
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models import llama, mixtral
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.interfaces import Dequantises
from vllm.model_executor.models.llama import AttentionDecoderLayer
from vllm.model_executor.models.utils import extract_layer_index, sliding_window

_EXPERTS = ".mlp.experts."


def experts_apart(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors with those of experts under `Experts.CHECKPOINT_NAMES`, mxfp4 made
    `dtype` one expert after another. What has no partner passes as it is, to be reported.

    A checkpoint has all experts of a layer in one tensor, gate and up as every other row: in 16
    bits as `gate_up_proj [experts, hidden, 2 * intermediate]` and
    `down_proj [experts, intermediate, hidden]`, or transposed in mxfp4 as `_blocks` and `_scales`;
    biases are `_bias [experts, rows]`.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, inside, part = name.partition(_EXPERTS)
        stack, _, kind = part.rpartition("_")
        if not inside:
            yield name, tensor
        elif part == "gate_up_proj_bias":
            yield name, torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
        elif part in ("gate_up_proj", "down_proj"):
            for expert, matrix in enumerate(tensor):
                yield from _of_one(layer, part, expert, matrix.t())
        elif kind in ("blocks", "scales"):
            waiting[name] = tensor
            pair = [
                waiting.get(f"{layer}{_EXPERTS}{stack}_{each}") for each in ("blocks", "scales")
            ]
            if pair[0] is None or pair[1] is None:
                continue
            record_dequantised(dtype)
            for expert, (blocks, scales) in enumerate(zip(*pair, strict=False)):
                yield from _of_one(layer, stack, expert, dequantised(blocks, scales, dtype))
            for each in ("blocks", "scales"):
                del waiting[f"{layer}{_EXPERTS}{stack}_{each}"]
        else:
            yield name, tensor
    yield from waiting.items()


def _of_one(layer: str, stack: str, expert: int, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`matrix [rows, columns]` of an expert, as its projections."""
    prefix = f"{layer}{_EXPERTS}{expert}"
    if stack == "down_proj":
        yield f"{prefix}.down_proj.weight", matrix
    else:
        yield f"{prefix}.gate_proj.weight", matrix[0::2]
        yield f"{prefix}.up_proj.weight", matrix[1::2]


#: of the activation, where the config does not say: it has learned to only lately
_ALPHA, _LIMIT = 1.702, 7.0


def attention_shape(config: PretrainedConfig, layer_index: int) -> SelfAttentionShape:
    """The attention of one layer; `layer_types` says which layers slide.

    Raises ValueError for an unknown layer type.
    """
    return replace(
        llama.attention_shape(config),
        sliding_window=sliding_window(config, layer_index),
        sinks=True,
    )


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """A softmax over the chosen logits; biases everywhere."""
    fields = config.to_dict()
    return replace(
        mixtral.mixture_shape(config),
        router_bias=True,
        expert_biases=True,
        clamp=ClampedSwiglu(
            float(fields.get("swiglu_alpha", _ALPHA)),
            float(fields.get("swiglu_limit", _LIMIT)),
            offset=1.0,
        ),
    )


class GptOssDecoderLayer(AttentionDecoderLayer):
    """Attention with sinks, then experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        shape = attention_shape(config, extract_layer_index(prefix))
        mlp = MixtureOfExperts(mixture_shape(config), f"{prefix}.mlp", vllm_config.quant_config)
        super().__init__(vllm_config, shape, prefix, mlp=mlp)


class GptOssForCausalLM(DecoderForCausalLM, Dequantises):
    """`GptOssForCausalLM` checkpoints, experts in mxfp4 or in 16 bits."""

    dequantised_methods = (MXFP4,)
    layer_class = GptOssDecoderLayer
    fused_names = (*DecoderForCausalLM.fused_names, ("router", "router", 0))
    stacked_names = Experts.CHECKPOINT_NAMES

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(experts_apart(weights, self.dtype))
