# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: hyper-connections around attention over windows and compressed entries, and around
experts, which the first layers choose by token id."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm import decisions
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.moe import ClampedSwiglu, RoutingRule
from vllm.model_executor.layers.compressed_attention import (
    DENSE_RATIO,
    SPARSE_RATIO,
    CompressedAttention,
    CompressedAttentionShape,
)
from vllm.model_executor.layers.hyper_connection import (
    HyperConnection,
    HyperConnectionShape,
    StreamCollapse,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.quantization.mxfp4 import without_packing
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models.causal_lm import CapturedCausalLM
from vllm.model_executor.models.decoder import DecoderModel, Hidden
from vllm.model_executor.models.utils import LayerFactory, extract_layer_index
from vllm.model_executor.models.weights import WeightsMapper
from vllm.sequence import IntermediateTensors

#: A checkpoint's names -> those here, which are the release's but for prefixes and experts. All
#: names that there are go through it; those here stay as they are.
NAMES = WeightsMapper(
    orig_to_new_substr={
        # of transformers' modules
        ".self_attn.": ".attn.",
        ".mlp.": ".ffn.",
        ".input_layernorm.": ".attn_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".attn_hc.": ".hc_attn.",
        ".ffn_hc.": ".hc_ffn.",
        ".attn.sinks": ".attn.attn_sink",
        ".q_a_proj.": ".wq_a.",
        ".q_a_norm.": ".q_norm.",
        ".compressor.indexer.scorer.weights_proj.": ".indexer.weights_proj.",
        ".compressor.indexer.q_b_proj.": ".indexer.wq_b.",
        ".compressor.indexer.": ".indexer.compressor.",
        ".q_b_proj.": ".wq_b.",
        ".compressor.kv_norm.": ".compressor.norm.",
        ".compressor.gate_proj.": ".compressor.wgate.",
        ".kv_proj.": ".wkv.",
        ".o_a_proj.": ".wo_a.",
        ".o_b_proj.": ".wo_b.",
        ".position_bias": ".ape",
        # as transformers saves it: its rule for compressors' norms reaches this one, too
        ".attn.norm.": ".attn.kv_norm.",
        # of the release
        ".hc_attn_": ".hc_attn.",
        ".hc_ffn_": ".hc_ffn.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
        ".shared_experts.": ".shared_expert.",
        ".gate.bias": ".gate.e_score_correction_bias",
    },
    orig_to_new_prefix={
        "embed.": "model.embed_tokens.",
        "head.": "lm_head.",
        "layers.": "model.layers.",
        "norm.": "model.norm.",
        "hc_head_": "model.hc_head.",
        "model.hc_head.hc_": "model.hc_head.",
    },
    orig_to_new_suffix={
        # Hyper-connections have a scale that is no weight's.
        **{f".hc_{part}.scale": f".hc_{part}.scale" for part in ("attn", "ffn", "head")},
        ".scale": ".weight_scale_inv",
    },
)

#: a layer's type in a config -> tokens per entry
_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": SPARSE_RATIO,
    "heavily_compressed_attention": DENSE_RATIO,
}


def compress_ratio(config: PretrainedConfig, layer_index: int) -> int:
    """Tokens per entry of a layer, 0 of one with a window only; ValueError for another ratio."""
    kind = config.layer_types[layer_index]
    if kind not in _RATIOS:
        raise VLLMValidationError(
            f"layer {layer_index} has type {kind!r}; supported: {', '.join(_RATIOS)}"
        )
    ratio = _RATIOS[kind]
    found = (config.compress_rates or {}).get(kind, ratio)
    if found != ratio:
        raise VLLMValidationError(
            f"compress_rates: {kind} at {found} is not supported; supported: {ratio}"
        )
    return ratio


def attention_shape(config: PretrainedConfig, layer_index: int) -> CompressedAttentionShape:
    """Of one layer; ValueError for a type that is not supported."""
    return CompressedAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rotary_dim=config.qk_rope_head_dim,
        query_low_rank=config.q_lora_rank,
        output_groups=config.o_groups,
        output_low_rank=config.o_lora_rank,
        window=config.sliding_window,
        ratio=compress_ratio(config, layer_index),
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        eps=config.rms_norm_eps,
    )


def rope_of(config: PretrainedConfig, max_model_len: int, compressed: bool) -> RotaryEmbedding:
    """The rotation of layers with entries, or of those without: YaRN is for entries alone, and
    their angles have another base."""
    given = config.rope_parameters["compress" if compressed else "main"]
    # What remains of a head does not rotate, and it is the first part: see `CompressedAttention`.
    parameters = {key: given[key] for key in given if key != "partial_rotary_factor"}
    return get_rope(config.qk_rope_head_dim, max_model_len, rope_parameters=parameters)


def mixture_shape(config: PretrainedConfig, layer_index: int) -> MixtureShape:
    """Of one layer: scores that the release computes in fp32, one clamp for all experts, and a bias
    or a table that chooses. ValueError for another kind of routing."""
    if config.scoring_func != "sqrtsoftplus" or not config.norm_topk_prob:
        raise VLLMValidationError(
            f"scoring_func {config.scoring_func!r} with norm_topk_prob {config.norm_topk_prob} is "
            "not supported; supported: 'sqrtsoftplus' with norm_topk_prob"
        )
    hashed = config.mlp_layer_types[layer_index] == "hash_moe"
    return MixtureShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        rule=RoutingRule(
            config.num_experts_per_tok,
            scores="sqrtsoftplus",
            epsilon=1e-20,
            scale=config.routed_scaling_factor,
        ),
        shared_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        correction_bias=not hashed,
        hidden_act=config.hidden_act,
        wide_router=True,
        clamp=ClampedSwiglu(1.0, float(config.swiglu_limit), 0.0),
        hashed_vocab=config.vocab_size if hashed else 0,
    )


def connection_shape(config: PretrainedConfig) -> HyperConnectionShape:
    """Of all sublayers, and of the streams after the last."""
    return HyperConnectionShape(
        hidden_size=config.hidden_size,
        num_streams=config.hc_mult,
        norm_eps=config.rms_norm_eps,
        eps=config.hc_eps,
        iterations=config.hc_sinkhorn_iters,
    )


class DeepseekV4DecoderLayer(nn.Module):
    """Attention, then experts, each behind a norm and inside a hyper-connection."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model = vllm_config.model_config
        config, index = model.hf_text_config, extract_layer_index(prefix)
        quant_config = vllm_config.quant_config
        attention = attention_shape(config, index)
        rope = rope_of(config, model.max_model_len, compressed=attention.ratio > 0)
        self.attn = CompressedAttention(attention, rope, f"{prefix}.attn", quant_config)
        self.ffn = MixtureOfExperts(mixture_shape(config, index), f"{prefix}.ffn", quant_config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(connection_shape(config))
        self.hc_ffn = HyperConnection(connection_shape(config))

    def forward(self, positions: Tensor, input_ids: Tensor | None, streams: Tensor) -> Tensor:
        """`positions` and `input_ids [tokens]` int64, `streams [tokens, n, hidden]`: the streams
        after this layer."""
        connection = self.hc_attn.enter(streams)
        branch = self.attn(positions, self.attn_norm.normalise(connection.hidden))
        streams = self.hc_attn.leave(streams, branch, connection)
        connection = self.hc_ffn.enter(streams)
        branch = self.ffn(self.ffn_norm.normalise(connection.hidden), input_ids)
        return self.hc_ffn.leave(streams, branch, connection)


class DeepseekV4Model(DecoderModel):
    """Embedding, copied to all streams; layers; the streams' weighted sum and its norm."""

    norm: RMSNorm

    def __init__(
        self,
        config: PretrainedConfig,
        layer_fn: LayerFactory,
        norm: type[RMSNorm],
        prefix: str,
        *,
        eps: float | None = None,
    ) -> None:
        super().__init__(config, layer_fn, norm, prefix, eps=eps)
        self.hc_head = StreamCollapse(connection_shape(config))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Hidden:
        """Normalised hidden states `[tokens, hidden]`, with what is captured if anything is: the
        mean of the streams, and of those after the last layer the sum that is normalised. Layers
        that choose experts by token id need `input_ids [tokens]`, also beside `inputs_embeds`;
        ValueError without."""
        assert intermediate_tensors is None, "the model is no pipeline stage"
        aux: list[Tensor] = []
        embedded = self.embedded(input_ids, inputs_embeds)
        streams = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for index, layer in enumerate(self.layers):
            if index in self.aux_hidden_state_layers:
                self._maybe_add_hidden_state(aux, index, streams.mean(1), None)
            if index not in self.left_out:
                streams = layer(positions, input_ids, streams)
        total = self.hc_head(streams)
        self._maybe_add_hidden_state(aux, len(self.layers), total, None)
        hidden = self.norm.normalise(total)
        return (hidden, aux) if self.aux_hidden_state_layers else hidden


class DeepseekV4ForCausalLM(CapturedCausalLM):
    """`DeepseekV4ForCausalLM` checkpoints: as released, as transformers saves them, or with the
    names of its modules.

    Between layers a token has several streams, which pipeline stages (`SupportsPP`) would all have
    to hand on.
    """

    layer_class = DeepseekV4DecoderLayer
    model_class = DeepseekV4Model
    fused_names = (
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
        *Router.CHECKPOINT_NAMES,
    )
    stacked_names = Experts.CHECKPOINT_NAMES
    widened_names = ("wo_a",)
    weights_mapper = NAMES
    unused_weights: ClassVar[Mapping[str, str]] = {
        "mtp.": "no speculative method of this engine drafts with a mixture's head"
    }

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        super().set_aux_hidden_state_layers(layers)
        decisions.record(
            "captured streams",
            f"the mean of a token's {self.config.hc_mult}; after the last layer their weighted sum",
            "drafters read one row per layer, DeepSeek's own that mean, and trainers make the "
            "target's logits from what its final norm reads",
            instead_of="all streams",
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = self.weights_mapper.apply(weights)
        return super().load_weights(without_packing(named, self.dtype))
