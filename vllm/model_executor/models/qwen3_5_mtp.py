# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction head of Qwen3.5 checkpoints, `mtp.*`: one full-attention layer.

    x = fc [norm_e(embed(x_{t+1})); norm_h(h_t)];  y = norm(layer(x));  logits = lm_head(y)

`h_t` is the target's hidden state after its final norm, and `y` the head's for the next draft.
"""

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.cache_scales import rename_cache_scales
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.draft_head import DraftHead, DraftTarget
from vllm.model_executor.models.draft_logits import DraftLogits
from vllm.model_executor.models.qwen3_5 import Qwen3_5DecoderLayer
from vllm.model_executor.models.weights import AutoWeightsLoader, WeightsError, WeightsMapper

_PREFIX = "mtp."

#: of speculators' own files, which name the same tensors otherwise
SPECULATORS_NAMES = WeightsMapper(
    orig_to_new_prefix={
        "mtp_layers.0.input_proj.": "mtp.fc.",
        "mtp_layers.0.final_layernorm.": "mtp.norm.",
        "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
        "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
        "mtp_layers.0.": "mtp.layers.0.",
    }
)


class Qwen3_5MTP(DraftHead):
    """Embeddings and output head are the target's."""

    prefix = "mtp"

    def __init__(self, *, vllm_config: VllmConfig, target: DraftTarget) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.hidden_size = config.hidden_size
        self._embed = target.embed_input_ids
        self.logits = DraftLogits.of_model(target)
        norm = partial(GemmaRMSNorm, config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.fc = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = Qwen3_5DecoderLayer(vllm_config, f"{_PREFIX}layers.0", kind="full_attention")
        self.layers = nn.ModuleList([layer])
        self.mark_cache()

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        return hidden

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        stream, _ = self._layer(positions, self._joined(input_ids, hidden_states))
        hidden, _ = self.norm.enter(stream)
        return hidden, hidden

    def keep(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> None:
        layer, stream = self._layer, self._joined(input_ids, hidden_states)
        layer.self_attn.keep_after_norm(layer.input_layernorm, positions, stream)

    @property
    def _layer(self) -> Qwen3_5DecoderLayer:
        return cast(Qwen3_5DecoderLayer, self.layers[0])

    def _joined(self, input_ids: Tensor, hidden_states: Tensor) -> ResidualStream:
        """What the layer reads."""
        token = self.pre_fc_norm_embedding(self._embed(input_ids))
        joined = torch.cat([token, self.pre_fc_norm_hidden(hidden_states)], dim=-1)
        return ResidualStream(self.fc(joined)[0])

    def wants(self, name: str) -> bool:
        return name.startswith((_PREFIX, "mtp_layers."))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = [
            (name.removeprefix(_PREFIX), tensor)
            for name, tensor in SPECULATORS_NAMES.apply(weights)
            if name.startswith(_PREFIX)
        ]
        if not own:
            raise WeightsError(
                ["the checkpoint has no mtp.* tensors, which method mtp drafts with"]
            )
        loader = AutoWeightsLoader(self, fused=DecoderForCausalLM.fused_names)
        return loader.load_weights(rename_cache_scales(own, self))
