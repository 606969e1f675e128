# SPDX-License-Identifier: Apache-2.0
"""What a DFlash drafter would propose after every token of a text, without an engine.

The plain form of `vllm.model_executor.models.dflash`, whose docstring has the equations. What the
layers keep of the text is projected once; the blocks after all tokens run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm.benchmarks.target_tensors import TargetTensors
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

if TYPE_CHECKING:
    from vllm.transformers_utils.configs.dflash import DFlashConfig

#: blocks whose scores are in memory at a time
_BLOCKS = 64


class BlockDrafts:
    """`tensors` of the checkpoint; sequences of at most `max_tokens`.

    Raises `VLLMValidationError` for a checkpoint that adds a bias of the draft before.
    """

    def __init__(
        self,
        config: DFlashConfig,
        tensors: Mapping[str, Tensor],
        target: TargetTensors,
        max_tokens: int,
    ) -> None:
        if config.markov_rank:
            raise VLLMValidationError(
                "--drafter is of type dspark with a bias of the draft before (markov_rank "
                f"{config.markov_rank}), which is not predicted; dflash and markov_rank 0 are",
                "drafter",
            )
        self.config, self.layers = config, config.get_text_config()
        self._t = {name: t.float() for name, t in tensors.items() if t.is_floating_point()}
        self._embedding = target.embedding
        own = self._t.get("lm_head.weight")
        self._head = target.output_head if own is None else own
        ids = torch.arange(len(self._head))
        self._to_target = ids + tensors["d2t"] if "d2t" in tensors else ids
        rope = {"rope_theta": 10000.0, **(self.layers.rope_parameters or {})}
        self._rope = RotaryEmbedding(self.layers.head_dim, max_tokens + config.block_size + 1, rope)

    @torch.inference_mode()
    def drafts(self, streams: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """As `DraftChains.drafts`."""
        context = self._norm(self._linear(streams.float().flatten(1), "fc"), "hidden_norm")
        kept = [self._kept(context, index) for index in range(self.layers.num_hidden_layers)]
        anchors = token_ids[1:]
        return torch.cat(
            [
                self._propose(anchors[i : i + _BLOCKS], i, kept, depth)
                for i in range(0, len(anchors), _BLOCKS)
            ]
        )

    def _kept(self, context: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the text in one layer, `[n, kv heads, head_dim]`."""
        _, k, v = self._projected(context, index, torch.arange(len(context)), queries=False)
        return k, v

    def _propose(
        self, anchors: Tensor, first: int, kept: list[tuple[Tensor, Tensor]], depth: int
    ) -> Tensor:
        """Of the blocks after rows `first` and on, that begin with `anchors`: `[blocks, depth]`."""
        size = self.config.block_size
        ids = torch.full((len(anchors), size), self.config.mask_token_id)
        ids[:, 0] = anchors
        rows = torch.arange(first, first + len(anchors))
        positions = rows[:, None] + 1 + torch.arange(size)
        x = self._embedding[ids]
        for index, layer in enumerate(kept):
            name = f"layers.{index}."
            normed = self._norm(x, f"{name}input_layernorm")
            x = x + self._attention(normed, index, rows, positions, layer)
            normed = self._norm(x, f"{name}post_attention_layernorm")
            gated = silu(self._linear(normed, f"{name}mlp.gate_proj"))
            gated = gated * self._linear(normed, f"{name}mlp.up_proj")
            x = x + self._linear(gated, f"{name}mlp.down_proj")
        begin = self.config.first_draft
        logits = linear(self._norm(x, "norm")[:, begin : begin + depth], self._head)
        return self._to_target[logits.argmax(-1)]

    def _projected(
        self, x: Tensor, index: int, positions: Tensor, queries: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows `x [n, hidden]` at `positions [n]`."""
        name, dim = f"layers.{index}.self_attn.", self.layers.head_dim
        k, v = (self._linear(x, f"{name}{p}_proj").unflatten(-1, (-1, dim)) for p in "kv")
        q = self._linear(x, f"{name}q_proj").unflatten(-1, (-1, dim)) if queries else k
        q = self._norm(q, f"{name}{'q' if queries else 'k'}_norm")
        q, k = self._rope(positions, q, self._norm(k, f"{name}k_norm"))
        return q, k, v

    def _attention(
        self, x: Tensor, index: int, rows: Tensor, positions: Tensor, kept: tuple[Tensor, Tensor]
    ) -> Tensor:
        """`x [blocks, block_size, hidden]`; each block sees the text up to its own row of `rows`
        and itself."""
        blocks, size = x.shape[:2]
        text_k, text_v = kept
        flat = self._projected(x.flatten(0, 1), index, positions.flatten())
        q, k, v = (part.unflatten(0, (blocks, size)) for part in flat)
        q = q.unflatten(2, (k.shape[2], -1)) / self.layers.head_dim**0.5
        scores = torch.cat(
            [torch.einsum("bqkgd,nkd->bkgqn", q, text_k), torch.einsum("bqkgd,bskd->bkgqs", q, k)],
            dim=-1,
        )
        hidden = self._hidden(index, rows, len(text_k))
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        of_text, own = weights.split([len(text_k), size], dim=-1)
        out = torch.einsum("bkgqn,nkd->bqkgd", of_text, text_v)
        out = out + torch.einsum("bkgqs,bskd->bqkgd", own, v)
        return self._linear(out.flatten(2), f"layers.{index}.self_attn.o_proj")

    def _hidden(self, index: int, rows: Tensor, num_rows: int) -> Tensor:
        """What the rows of each block do not see: `[blocks, block_size, text and block]`."""
        size, text = self.config.block_size, torch.arange(num_rows)
        past = text > rows[:, None]
        inside = torch.zeros(size, size, dtype=torch.bool)
        if self.layers.layer_types[index] == "sliding_attention":
            past = past | (text < rows[:, None] + 1 - self.layers.sliding_window)
            if not self.config.sliding_window_non_causal:
                inside = torch.ones(size, size, dtype=torch.bool).triu(1)
        return torch.cat(
            [past[:, None].expand(-1, size, -1), inside.expand(len(rows), -1, -1)], dim=-1
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._t[f"{name}.weight"], self._t.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.layers.rms_norm_eps) * self._t[f"{name}.weight"]
