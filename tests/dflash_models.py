# SPDX-License-Identifier: Apache-2.0
"""DFlash checkpoints for tiny targets, and what they compute, in plain torch at any dtype."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.draft_models import (
    HeadReference,
    Shape,
    gen,
    layer_shapes,
    rms,
    rotate,
    speculators_config,
)

MASK_ID = 5


@dataclass(frozen=True)
class Block:
    """A DFlash drafter beside its sizes: `windows` by layer (None: full attention)."""

    size: int = 4
    windows: tuple[int | None, ...] = (None,)
    non_causal: bool = False
    from_anchor: bool = False

    @property
    def first(self) -> int:
        return 0 if self.from_anchor else 1


def dflash_tensors(shape: Shape, block: Block) -> dict[str, Tensor]:
    """A checkpoint's tensors, fp64."""
    h = shape.hidden
    shapes: dict[str, list[int]] = {"fc.weight": [h, shape.num_aux * h]}
    shapes |= {"hidden_norm.weight": [h], "norm.weight": [h]}
    for i in range(len(block.windows)):
        shapes |= layer_shapes(shape, f"layers.{i}.", h, gated=False)
        shapes |= {f"layers.{i}.self_attn.{n}_norm.weight": [shape.head_dim] for n in "qk"}
    if shape.draft_vocab != shape.vocab:
        shapes["lm_head.weight"] = [shape.draft_vocab, h]
    tensors = {}
    for name, size in shapes.items():
        amp, center = (0.25, 1.0) if len(size) == 1 else (0.2, 0.0)
        tensors[name] = gen(f"dflash.{name}", size, amp, center)
    if shape.draft_vocab != shape.vocab:
        ids = torch.arange(shape.draft_vocab)
        tensors["d2t"] = ids + ids % 2
        kept = torch.zeros(shape.vocab, dtype=torch.bool)
        tensors["t2d"] = kept.index_fill(0, ids + tensors["d2t"], True)
    return tensors


def write_dflash(
    path: Path,
    verifier: Path | None,
    shape: Shape,
    block: Block,
    *,
    layer_ids: Sequence[int] = (1, 2, 3),
    tensors: dict[str, Tensor] | None = None,
    layer_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A speculators checkpoint in fp32; `config` replaces keys of its config (None: leaves out)."""
    path.mkdir(parents=True, exist_ok=True)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in block.windows]
    fields = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": list(layer_ids),
        "mask_token_id": MASK_ID,
        "block_size": block.size,
        "sample_from_anchor": block.from_anchor,
        "sliding_window_non_causal": block.non_causal,
        "speculators_config": speculators_config("dflash", verifier, block.size - block.first),
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_hidden_layers": len(kinds),
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": kinds,
            "sliding_window": next((w for w in block.windows if w is not None), None),
            **(layer_config or {}),
        },
    } | config
    fields = {key: value for key, value in fields.items() if key not in config or value is not None}
    (path / "config.json").write_text(json.dumps(fields))
    found = tensors or dflash_tensors(shape, block)
    stored = {k: t.float() if t.is_floating_point() else t for k, t in found.items()}
    save_file({k: t.contiguous() for k, t in stored.items()}, path / "model.safetensors")
    return path


class DFlashReference(HeadReference):
    """Of every anchor by itself. `embed, head`: the target's, or the checkpoint's own head."""

    def __init__(
        self, tensors: dict[str, Tensor], shape: Shape, block: Block, embed: Tensor, head: Tensor
    ) -> None:
        own = tensors.get("lm_head.weight")
        super().__init__(tensors, embed, head if own is None else own.to(embed.dtype))
        self.shape, self.block = shape, block
        if "d2t" in tensors:
            self.to_target = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        return rms(self.linear(torch.cat(aux, dim=-1), "fc"), self.t["hidden_norm.weight"])

    def chains(
        self, hidden: Tensor, tokens: Tensor, num_drafts: int, after: Sequence[int]
    ) -> dict[int, tuple[list[int], list[Tensor]]]:
        found = {}
        for n in after:
            logits = self.drafting(hidden[:n], int(tokens[n - 1]))[:num_drafts]
            best = logits.argmax(-1)
            drafts = best if self.to_target is None else self.to_target[best]
            found[n] = drafts.tolist(), list(logits)
        return found

    def drafting(self, context: Tensor, anchor: int) -> Tensor:
        """Logits `[drafts, draft vocab]` of the block after `context [n, hidden]`."""
        size, n = self.block.size, len(context)
        ids = torch.tensor([anchor, *[MASK_ID] * (size - 1)])
        x, positions = self.embed[ids], torch.arange(n + size)
        for i, window in enumerate(self.block.windows):
            prefix = f"layers.{i}."
            normed = rms(x, self.t[f"{prefix}input_layernorm.weight"])
            x = x + self._attention(torch.cat([context, normed]), prefix, positions, window)
            x = x + self.mlp(rms(x, self.t[f"{prefix}post_attention_layernorm.weight"]), prefix)
        return rms(x, self.t["norm.weight"])[self.block.first :] @ self.head.T

    def _attention(
        self, rows: Tensor, prefix: str, positions: Tensor, window: int | None
    ) -> Tensor:
        size, dim = self.block.size, self.shape.head_dim
        parts = [self.linear(rows, f"{prefix}self_attn.{p}_proj") for p in "qkv"]
        q, k, v = (part.view(len(rows), -1, dim) for part in parts)
        q, k = (
            rotate(rms(part, self.t[f"{prefix}self_attn.{p}_norm.weight"]), positions, dim, 1e4)
            for p, part in (("q", q), ("k", k))
        )
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[-size:], k) / dim**0.5
        first = len(rows) - size
        hidden = torch.zeros(size, len(rows), dtype=torch.bool)
        if window is not None:
            hidden |= positions < first - window
            if not self.block.non_causal:
                hidden |= positions > positions[-size:, None]
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return self.linear(out.flatten(1), f"{prefix}self_attn.o_proj")
