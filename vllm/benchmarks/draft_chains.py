# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE-3 head would draft after every token of a text, all at once and without an engine.
Heads of other kinds: `mtp_chains`, `block_drafts`.

The plain form of `vllm.model_executor.models.eagle3`, whose docstring has the equations. Rows of
the text are computed once, from the target's hidden states. A chain of drafts after row t sees the
rows up to t and its own; the chains after all rows run side by side, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

if TYPE_CHECKING:
    from vllm.transformers_utils.configs.eagle3 import Eagle3Config

#: rows whose scores are in memory at a time
ROWS = 256
_OWN = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class ChainCache:
    """One layer's keys and values, `[rows, kv heads, head_dim]`: of the text, and of each step of
    the chains, where row t belongs to the chain after row t."""

    keys: list[Tensor]
    values: list[Tensor]


class DraftChains:
    """`tensors` of the checkpoint, in fp32; sequences of at most `max_tokens`.

    Raises `VLLMValidationError` for a checkpoint without embedding or output head of its own.
    """

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, Tensor], max_tokens: int
    ) -> None:
        from transformers.activations import ACT2FN

        absent = [name for name in _OWN if name not in tensors]
        if absent:
            raise VLLMValidationError(
                f"the draft checkpoint has no {', '.join(absent)}; predicting its drafts needs one "
                "that holds them, as speculators writes it"
            )
        self.config, self.layers = config, config.get_text_config()
        self._t = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self._act: Callable[[Tensor], Tensor] = ACT2FN[self.layers.hidden_act]
        size = self.layers.head_dim
        rope = {"rope_theta": 10000.0, **(self.layers.rope_parameters or {})}
        self._rope = RotaryEmbedding(size, max_tokens + 16, rope)
        ids = torch.arange(len(self._t["lm_head.weight"]))
        self._to_target = ids + self._t["d2t"] if "d2t" in self._t else ids

    @torch.inference_mode()
    def drafts(self, streams: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """`streams [n, layers read, hidden]`, `token_ids [n + 1]` of the rows and the one after.
        Returns `[n, depth]` ids: row t has the drafts of the tokens at t + 2 and later."""
        hidden = self._fuse(streams.float())
        tokens = token_ids[1:]
        caches = [ChainCache([], []) for _ in range(self.layers.num_hidden_layers)]
        found = []
        for ahead in range(depth):
            normed, hidden = self._step(hidden, tokens, ahead, caches)
            tokens = self._to_target[linear(normed, self._t["lm_head.weight"]).argmax(-1)]
            found.append(tokens)
        return torch.stack(found, dim=1)

    def _fuse(self, streams: Tensor) -> Tensor:
        if self.config.fc_norm:
            streams = torch.stack(
                [self._norm(x, f"fc_norm.{i}") for i, x in enumerate(streams.unbind(1))], dim=1
            )
        joined = streams.flatten(1)
        if self.config.norm_before_fc:
            joined = self._norm(joined, "input_norm")
        return self._linear(joined, "fc")

    def _step(
        self, hidden: Tensor, tokens: Tensor, ahead: int, caches: list[ChainCache]
    ) -> tuple[Tensor, Tensor]:
        """What `lm_head` takes and what the next step starts from; `ahead` 0 is the text."""
        normed = self._norm(hidden, "layers.0.hidden_norm")
        embedded = self._norm(self._t["embed_tokens.weight"][tokens], "layers.0.input_layernorm")
        entered = torch.cat([embedded, normed], dim=-1)
        stream = normed if self.config.norm_before_residual else hidden
        for index, cache in enumerate(caches):
            name = f"layers.{index}."
            x = self._norm(stream, f"{name}input_layernorm") if index else entered
            stream = stream + self._attention(x, index, ahead, cache)
            x = self._norm(stream, f"{name}post_attention_layernorm")
            gate = self._act(self._linear(x, f"{name}mlp.gate_proj"))
            gated = gate * self._linear(x, f"{name}mlp.up_proj")
            stream = stream + self._linear(gated, f"{name}mlp.down_proj")
        out = self._norm(stream, "norm")
        return out, out if self.config.norm_output else stream

    def _attention(self, x: Tensor, index: int, ahead: int, cache: ChainCache) -> Tensor:
        name, size = f"layers.{index}.self_attn.", self.layers.head_dim
        q, k, v = (self._linear(x, f"{name}{p}_proj").unflatten(-1, (-1, size)) for p in "qkv")
        if f"{name}q_norm.weight" in self._t:
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        q, k = self._rope(torch.arange(len(x)) + ahead, q, k)
        cache.keys.append(k)
        cache.values.append(v)
        slides = self.layers.layer_types[index] == "sliding_attention"
        window = self.layers.sliding_window if slides else None
        out = attend(q, ahead, cache, window)
        return self._linear(out.flatten(1), f"{name}o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._t[f"{name}.weight"], self._t.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.layers.rms_norm_eps) * self._t[f"{name}.weight"]


def attend(q: Tensor, ahead: int, cache: ChainCache, window: int | None) -> Tensor:
    """Step `ahead` of all chains, `q [rows, heads, head_dim]`, over the cache with the step's own
    keys and values in it; as `q`."""
    parts = range(0, len(q), ROWS)
    return torch.cat([_attend(q, slice(i, i + ROWS), ahead, cache, window) for i in parts])


def _attend(q: Tensor, rows: slice, ahead: int, cache: ChainCache, window: int | None) -> Tensor:
    """`rows` of step `ahead`: `[rows, heads, head_dim]`."""
    text_keys, text_values = cache.keys[0], cache.values[0]
    kv_heads, size = text_keys.shape[1:]
    grouped = q[rows].unflatten(1, (kv_heads, -1)) / size**0.5
    at = torch.arange(len(q))[rows, None]
    text = torch.arange(len(q))
    hidden = text > at
    if window is not None:
        hidden = hidden | (at + ahead - text >= window)
    scores = torch.einsum("nkgd,skd->nkgs", grouped, text_keys)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    own_values = [values[rows] for values in cache.values[1:]]
    own = [(grouped * keys[rows].unsqueeze(2)).sum(-1, keepdim=True) for keys in cache.keys[1:]]
    if window is not None:
        kept = range(max(0, ahead - window), ahead)
        own, own_values = [own[i] for i in kept], [own_values[i] for i in kept]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1)
    out = torch.einsum("nkgs,skd->nkgd", weights[..., : len(q)], text_values)
    for index, values in enumerate(own_values):
        out = out + weights[..., len(q) + index, None] * values.unsqueeze(2)
    return out.flatten(1, 2)
