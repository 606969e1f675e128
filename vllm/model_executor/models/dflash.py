# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark drafters in the format of the speculators library: drafts in one pass.

    c_t = norm(fc [the target's residual streams after some layers at t])
    block = embed([x_p, mask, mask, ...]) at positions p, p + 1, ...
    in every layer the block's rows attend to keys and values of c_0 ... c_{p-1} and of each other

so what a layer keeps of a token before the block is a projection of `c_t` alone: the token after
it, which other heads' rows depend on, has no part in it. DSpark adds to a row's logits what a
factored matrix of pairs of tokens has for the draft before: the only part that goes draft by draft.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.attention import QueryRows
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.cache_scales import rename_cache_scales
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models import llama
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.draft_head import DraftTarget, DraftVocabulary
from vllm.model_executor.models.llama import AttentionDecoderLayer
from vllm.model_executor.models.utils import sliding_window
from vllm.model_executor.models.weights import AutoWeightsLoader
from vllm.transformers_utils.configs.dflash import DFlashConfig
from vllm.v1.sample.vocab_shard import VocabShard

_PREFIX = "dflash"
_NOT_READ = {
    # in older checkpoints
    "embed_tokens.weight": "the target's embedding is used",
    "confidence_head.": "drafts are verified whatever their confidence",
}


def attention_shape(
    config: PretrainedConfig, index: int, *, windows_are_whole: bool
) -> SelfAttentionShape:
    """The attention of the `index`-th layer. VLLMValidationError as of `sliding_window`."""
    window = sliding_window(config, index)
    whole = window is None or windows_are_whole
    return replace(
        llama.attention_shape(config),
        eps=config.rms_norm_eps,
        qk_norm=RMSNorm,
        # The format counts the tokens before the block, the cache the block's first one as well.
        sliding_window=None if window is None else window + 1,
        rows=QueryRows.WHOLE_BLOCK if whole else QueryRows.CAUSAL_BLOCK,
    )


class DFlashLayer(AttentionDecoderLayer):
    """Rotary attention with head norms and a gated MLP."""

    def __init__(self, vllm_config: VllmConfig, index: int) -> None:
        fields: DFlashConfig = vllm_config.model_config.hf_config
        config = vllm_config.model_config.hf_text_config
        shape = attention_shape(config, index, windows_are_whole=fields.sliding_window_non_causal)
        super().__init__(vllm_config, shape, f"{_PREFIX}.layers.{index}")


class MarkovHead(nn.Module):
    """What a token before adds to the logits: `w2 w1[token]`, of rank `rank`."""

    def __init__(self, rank: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = VocabParallelEmbedding(vocab_size, rank)
        self.markov_w2 = ParallelLMHead(draft_vocab_size, rank)
        self.logits_processor = LogitsProcessor(draft_vocab_size)

    def forward(self, tokens: Tensor, shard: VocabShard | None) -> Tensor:
        """`tokens [n]` int64 of the target's vocabulary `-> [n, draft vocab]`; with a `shard` this
        rank's part, `[n, size]`."""
        pairs = self.markov_w1(tokens)
        if shard is None:
            return self.logits_processor(self.markov_w2, pairs)
        return shard.own(self.logits_processor.own(self.markov_w2, pairs))


class DFlashDraftModel(DraftVocabulary):
    """`vllm_config.model_config.hf_config` is a `DFlashConfig`, its text config the layers'. The
    embedding is the target's."""

    prefix = _PREFIX

    def __init__(self, *, vllm_config: VllmConfig, target: DraftTarget) -> None:
        super().__init__()
        fields: DFlashConfig = vllm_config.model_config.hf_config
        config = vllm_config.model_config.hf_text_config
        self.hidden_size = config.hidden_size
        self.aux_layer_ids = tuple(fields.aux_layer_ids)
        self._embed = target.embed_input_ids
        wide = len(self.aux_layer_ids) * fields.target_hidden_size
        self.fc = ReplicatedLinear(wide, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DFlashLayer(vllm_config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.init_vocabulary(fields.draft_vocab_size, config.vocab_size, config.hidden_size, target)
        self.markov_head: MarkovHead | None = None
        if fields.markov_rank:
            sizes = (config.vocab_size, fields.draft_vocab_size)
            self.markov_head = MarkovHead(fields.markov_rank, *sizes)

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        return self.hidden_norm.normalise(self.fc(torch.cat(aux, dim=-1))[0])

    def keep_context(self, positions: Tensor, context: Tensor) -> None:
        """Keep what blocks after them see of tokens at `positions [tokens]` int64, of which `fuse`
        gave `context [tokens, hidden_size]`."""
        for layer in self.layers:
            cast(DFlashLayer, layer).self_attn.keep(positions, context)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Blocks one after another, `input_ids, positions [tokens]` int64. Returns what
        `logits` takes, `[tokens, hidden_size]`."""
        stream = ResidualStream(self._embed(input_ids))
        for layer in self.layers:
            stream, _ = layer(positions, stream)
        return self.norm.enter(stream)[0]

    def choose(self, normed: Tensor, newest: Tensor) -> Tensor:
        """`normed [n, drafts, hidden_size]` of blocks that begin with the tokens `newest [n]`: the
        best drafts, `[n, drafts]` int64 ids of the target's vocabulary."""
        rows, shape = normed.flatten(0, 1), normed.shape[:2]
        if self.markov_head is None:
            return self.best_tokens(rows).unflatten(0, shape)
        drafts, logits = [newest], self.logits
        for row in logits(rows).unflatten(0, shape).unbind(1):
            best = logits.best(row + self.markov_head(drafts[-1], logits.shard))
            drafts.append(self.target_ids(best))
        return torch.stack(drafts[1:], dim=1)

    # ---- weights -------------------------------------------------------------------------------

    def wants(self, name: str) -> bool:
        return True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        maps: dict[str, Tensor] = {}
        loader = AutoWeightsLoader(
            self,
            fused=DecoderForCausalLM.fused_names,
            skip_prefixes=self.head_not_read() | _NOT_READ,
        )
        weights = rename_cache_scales(self.without_maps(weights, maps), self)
        loaded = loader.load_weights(weights)
        self.finish_vocabulary(maps, loaded)
        return loaded
