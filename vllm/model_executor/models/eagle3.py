# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 draft heads (arXiv 2503.01840) in the format of the speculators library.

    h = fc c,  c = the target's residual streams after some layers, side by side
    e = norm(embed(x_{t+1})),  u = norm(h);  z = (u or h) + attention([e; u]);  z = z + mlp(norm(z))
    o = norm(z),  logits = lm_head(o);  the next draft starts from o or z

Flags of the config choose: see `Eagle3Config`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm import decisions
from vllm.config import VllmConfig
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.cache_scales import rename_cache_scales
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import llama
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.draft_head import DraftHead, DraftTarget, DraftVocabulary
from vllm.model_executor.models.llama import AttentionDecoderLayer
from vllm.model_executor.models.utils import sliding_window
from vllm.model_executor.models.weights import AutoWeightsLoader
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.configs.eagle3 import Eagle3Config

_PREFIX = "eagle3"
_EMBEDDING = "embed_tokens.weight"
#: rows of two embeddings that are compared at a time
_COMPARED = 8192


def attention_shape(config: PretrainedConfig, index: int) -> SelfAttentionShape:
    """The attention of the `index`-th layer; the first one's input is a token and a hidden state.

    VLLMValidationError as of `sliding_window`.
    """
    return replace(
        llama.attention_shape(config),
        eps=config.rms_norm_eps,
        qk_norm=RMSNorm if config.model_type == "qwen3" else None,
        sliding_window=sliding_window(config, index),
        input_size=2 * config.hidden_size if index == 0 else None,
    )


class Eagle3Layer(AttentionDecoderLayer):
    """Rotary attention and gated MLP; the first layer also takes the tokens' embeddings."""

    def __init__(self, vllm_config: VllmConfig, index: int) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(
            vllm_config,
            attention_shape(config, index),
            f"{_PREFIX}.layers.{index}",
            mlp_bias=config.model_type == "llama" and config.mlp_bias,
        )
        if index == 0:
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def enter(
        self, positions: Tensor, tokens: Tensor, hidden: Tensor, *, norm_residual: bool
    ) -> ResidualStream:
        """The first layer: `tokens, hidden [tokens, hidden]`, embeddings and hidden states."""
        normed, joined = self._joined(tokens, hidden)
        branch = self.self_attn(positions, joined)
        stream = ResidualStream(normed if norm_residual else hidden, branch)
        return self.mlp.after_norm(self.post_attention_layernorm, stream)[0]

    def keep_first(self, positions: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """The keys and values that `enter` keeps, and nothing else."""
        self.self_attn.keep(positions, self._joined(tokens, hidden)[1])

    def keep(self, positions: Tensor, stream: ResidualStream) -> None:
        """The keys and values that a later layer keeps, and nothing else."""
        self.self_attn.keep_after_norm(self.input_layernorm, positions, stream)

    def _joined(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states' norm, and the attention's input `[tokens, 2 * hidden]`."""
        normed = self.hidden_norm.normalise(hidden)
        return normed, torch.cat([self.input_layernorm.normalise(tokens), normed], dim=-1)


class Eagle3DraftModel(DraftHead, DraftVocabulary):
    """`vllm_config.model_config.hf_config` is an `Eagle3Config`, its text config the layers'."""

    prefix = _PREFIX

    def __init__(self, *, vllm_config: VllmConfig, target: DraftTarget) -> None:
        super().__init__()
        fields: Eagle3Config = vllm_config.model_config.hf_config
        config = vllm_config.model_config.hf_text_config
        self.fields = fields
        self.hidden_size = config.hidden_size
        self.aux_layer_ids = tuple(fields.aux_layer_ids)
        streams, width = len(self.aux_layer_ids), fields.target_hidden_size
        self._embed_target = target.embed_input_ids
        if fields.norm_before_fc:
            self.input_norm = RMSNorm(streams * width, config.rms_norm_eps)
        self.fc_norm = nn.ModuleList(
            RMSNorm(width, config.rms_norm_eps) for _ in range(streams if fields.fc_norm else 0)
        )
        self.fc = ReplicatedLinear(streams * width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            Eagle3Layer(vllm_config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        #: None once it is known that the target's are used
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        set_weight_attrs(self.embed_tokens.weight, {"optional": True})
        self.init_vocabulary(fields.draft_vocab_size, config.vocab_size, config.hidden_size, target)
        self.mark_cache()

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        streams = aux
        if len(self.fc_norm):
            streams = [norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)]
        joined = torch.cat(streams, dim=-1)
        if self.fields.norm_before_fc:
            joined = self.input_norm.normalise(joined)
        return self.fc(joined)[0]

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        stream = self._after_layers(self._layers, input_ids, positions, hidden_states)
        normed, total = self.norm.enter(stream)
        return normed, normed if self.fields.norm_output else total

    def keep(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> None:
        *before, last = self._layers
        if not before:
            last.keep_first(positions, self._embed(input_ids), hidden_states)
            return
        stream = self._after_layers(before, input_ids, positions, hidden_states)
        last.keep(positions, stream)

    @property
    def _layers(self) -> list[Eagle3Layer]:
        return [cast(Eagle3Layer, layer) for layer in self.layers]

    def _after_layers(
        self, layers: list[Eagle3Layer], input_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> ResidualStream:
        """The stream after these, which begin with the first."""
        first, *others = layers
        norm_residual = self.fields.norm_before_residual
        embedded = self._embed(input_ids)
        stream = first.enter(positions, embedded, hidden, norm_residual=norm_residual)
        for layer in others:
            stream, _ = layer(positions, stream)
        return stream

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self.embed_tokens is None:
            return self._embed_target(input_ids)
        return self.embed_tokens(input_ids)

    # ---- weights -------------------------------------------------------------------------------

    def wants(self, name: str) -> bool:
        return True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        maps: dict[str, Tensor] = {}
        skipped = self.head_not_read()
        if self.embed_tokens is None:
            skipped[_EMBEDDING] = "the target's embedding is used"
        loader = AutoWeightsLoader(
            self, fused=DecoderForCausalLM.fused_names, skip_prefixes=skipped
        )
        weights = rename_cache_scales(self.without_maps(weights, maps), self)
        loaded = loader.load_weights(weights)
        self.finish_vocabulary(maps, loaded)
        if self.embed_tokens is not None:
            absent = _EMBEDDING not in loaded
            if absent or self._same_embedding(self.embed_tokens):
                self.embed_tokens = None
                loaded.discard(_EMBEDDING)
                why = "the draft checkpoint has none" if absent else "the draft checkpoint's is it"
                decisions.record("drafter's embedding", "the target's", why)
        return loaded

    def _same_embedding(self, own: VocabParallelEmbedding) -> bool:
        """Whether the target's embedding has the very bits of `own`."""
        for first in range(0, self.vocab_size, _COMPARED):
            last = min(first + _COMPARED, self.vocab_size)
            ids = torch.arange(first, last, device=own.weight.device)
            if not torch.equal(own(ids), self._embed_target(ids)):
                return False
        return True
