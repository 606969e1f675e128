# SPDX-License-Identifier: Apache-2.0
"""What the multi-token-prediction head of a Qwen3.5 target would draft after each token of a text.

The plain form of `vllm.model_executor.models.qwen3_5_mtp`, whose docstring has the equations.
Chains run side by side, as in `draft_chains`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm.benchmarks.draft_chains import ChainCache, attend
from vllm.benchmarks.target_tensors import TargetTensors
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.qwen3_5_mtp import SPECULATORS_NAMES


class MtpChains:
    """`text`: the target's text config; `tensors` of the checkpoint that has the head, others are
    not looked at; sequences of at most `max_tokens`.

    Raises `VLLMValidationError` for a checkpoint without a head.
    """

    def __init__(
        self, text: Any, tensors: Mapping[str, Tensor], target: TargetTensors, max_tokens: int
    ) -> None:
        self._text, self._target = text, target
        named = SPECULATORS_NAMES.apply(tensors.items())
        self._t = {name: tensor.float() for name, tensor in named if name.startswith("mtp.")}
        if not self._t:
            raise VLLMValidationError("--drafter has no mtp.* tensors", "drafter")
        self._rope = RotaryEmbedding(text.head_dim, max_tokens + 16, text.rope_parameters)

    @torch.inference_mode()
    def drafts(self, streams: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """`streams [n, 1, hidden]` after the target's last layer, before its final norm; else as
        `DraftChains.drafts`."""
        hidden = self._norm(streams[:, 0].float(), self._target.final_norm)
        tokens, cache, found = token_ids[1:], ChainCache([], []), []
        for ahead in range(depth):
            hidden = self._step(hidden, tokens, ahead, cache)
            tokens = linear(hidden, self._target.output_head).argmax(-1)
            found.append(tokens)
        return torch.stack(found, dim=1)

    def _step(self, hidden: Tensor, tokens: Tensor, ahead: int, cache: ChainCache) -> Tensor:
        """What the output head takes and the next step starts from; `ahead` 0 is the text."""
        token = self._normed(self._target.embedding[tokens], "pre_fc_norm_embedding")
        joined = torch.cat([token, self._normed(hidden, "pre_fc_norm_hidden")], dim=-1)
        stream = self._linear(joined, "fc")
        x = self._normed(stream, "layers.0.input_layernorm")
        stream = stream + self._attention(x, ahead, cache)
        x = self._normed(stream, "layers.0.post_attention_layernorm")
        gated = silu(self._linear(x, "layers.0.mlp.gate_proj"))
        gated = gated * self._linear(x, "layers.0.mlp.up_proj")
        return self._normed(stream + self._linear(gated, "layers.0.mlp.down_proj"), "norm")

    def _attention(self, x: Tensor, ahead: int, cache: ChainCache) -> Tensor:
        name, size = "layers.0.self_attn.", self._text.head_dim
        q, gate = self._linear(x, f"{name}q_proj").unflatten(-1, (-1, 2, size)).unbind(2)
        k = self._linear(x, f"{name}k_proj").unflatten(-1, (-1, size))
        v = self._linear(x, f"{name}v_proj").unflatten(-1, (-1, size))
        q, k = self._normed(q, f"{name}q_norm"), self._normed(k, f"{name}k_norm")
        q, k = self._rope(torch.arange(len(x)) + ahead, q, k)
        cache.keys.append(k)
        cache.values.append(v)
        out = attend(q, ahead, cache, None) * gate.sigmoid()
        return self._linear(out.flatten(1), f"{name}o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._t[f"mtp.{name}.weight"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, self._t[f"mtp.{name}.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The weights of this family are stored less one."""
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self._text.rms_norm_eps) * (1 + weight)
