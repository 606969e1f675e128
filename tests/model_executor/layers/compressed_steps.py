# SPDX-License-Identifier: Apache-2.0
"""Runs a layer of compressed attention step by step, and computes it in fp64 from its equations.

Every sequence owns a fixed run of blocks in each cache. Caches start filled with NaN, but for the
null block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.compressed_attention import (
    CompressedAttention,
    CompressedAttentionShape,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.state_layers import collect_layers
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

MAX_LEN = 512
YARN = {
    "rope_type": "yarn",
    "rope_theta": 160000.0,
    "factor": 16.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 256,
    "attention_factor": 1.0,
}
#: of every ratio; enough index heads for no two scores to be equal
SHAPES = {
    ratio: CompressedAttentionShape(
        hidden_size=24,
        num_heads=4,
        head_dim=16,
        rotary_dim=8,
        query_low_rank=12,
        output_groups=2,
        output_low_rank=6,
        window=10,
        ratio=ratio,
        index_heads=32,
        index_dim=12,
        index_topk=7,
        eps=1e-6,
    )
    for ratio in (0, 4, 128)
}


def make_layer(shape: CompressedAttentionShape, seed: int = 0) -> CompressedAttention:
    """With random weights, none of which leaves a mechanism without effect."""
    generator = torch.Generator().manual_seed(seed)
    parameters = YARN if shape.ratio else {"rope_theta": 10000.0}
    rope = get_rope(shape.rotary_dim, MAX_LEN, rope_parameters=parameters)
    layer = CompressedAttention(shape, rope, "attn")
    for name, param in layer.named_parameters():
        shift = 1.0 if "norm" in name else 0.0
        scale = 0.3 if param.dim() == 1 else 1.5 * param.shape[1] ** -0.5
        param.data.copy_(shift + scale * torch.randn(param.shape, generator=generator))
    return layer


def hidden(tokens: int, shape: CompressedAttentionShape, seed: int = 1) -> Tensor:
    return torch.randn(tokens, shape.hidden_size, generator=torch.Generator().manual_seed(seed))


class LayerSteps:
    """A layer with caches for `num_seqs` sequences. `tables[name][seq]`: the blocks of a cache."""

    def __init__(self, layer: nn.Module, config: VllmConfig, num_seqs: int = 3) -> None:
        self.layer, self.config = layer, config
        self.caches: dict[str, AttentionLayerBase] = collect_layers(config, layer)
        self.tables: dict[str, np.ndarray] = {}
        self.specs: dict[str, KVCacheSpec] = {}
        for name, cache in self.caches.items():
            spec = self.specs[name] = cache.get_kv_cache_spec(config)
            blocks = spec.blocks_for(MAX_LEN)
            (view,) = spec.views
            cache.kv_cache = torch.full(
                (1 + num_seqs * blocks, *view.shape), torch.nan, dtype=view.dtype
            )
            cache.kv_cache[0] = 0
            table = 1 + np.random.default_rng(0).permutation(num_seqs * blocks)
            self.tables[name] = table.astype(np.int32).reshape(num_seqs, blocks)

    def context(
        self, chunks: Sequence[tuple[int, int, int]], width: int = 1, padding: int = 0
    ) -> tuple[ForwardContext, Tensor]:
        """Of `chunks` (sequence, start, length), decodes of `width` tokens first, and then padding:
        the forward context and positions."""
        lengths = np.array([length for _, _, length in chunks])
        is_decode = [start > 0 and length == width for _, start, length in chunks]
        decodes = is_decode.index(False) if False in is_decode else len(chunks)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        prefill_starts = starts[decodes:] - starts[decodes]
        ends = np.array([start + length for _, start, length in chunks], dtype=np.int32)
        seqs = [seq for seq, _, _ in chunks]
        positions = np.concatenate([np.arange(s, s + n) for _, s, n in chunks])
        owners = np.repeat(seqs, lengths)
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for name, cache in self.caches.items():
            size = self.specs[name].block_size
            table = self.tables[name][seqs]
            place = self.tables[name][owners, positions // size].astype(np.int64) * size
            slot = np.concatenate([place + positions % size, np.full(padding, -1)])
            slots[name] = torch.from_numpy(slot)
            common = CommonAttentionMetadata(
                num_reqs=len(chunks),
                num_tokens=int(starts[-1]),
                num_decodes=decodes,
                decode_width=width,
                max_query_len=int(lengths.max()),
                max_seq_len=int(ends.max()),
                query_start_loc=torch.from_numpy(starts),
                query_start_loc_cpu=starts,
                seq_lens=torch.from_numpy(ends),
                seq_lens_cpu=ends,
                num_computed_tokens_cpu=ends - lengths,
                prefill_query_start_loc=torch.from_numpy(prefill_starts),
                prefill_query_start_loc_cpu=prefill_starts,
                block_table=torch.from_numpy(table),
                prefill_seq_lens=torch.from_numpy(ends[decodes:]),
                prefill_block_table=torch.from_numpy(table[decodes:]),
                slot_mapping=slots[name],
                block_table_cpu=table,
            )
            builder = cache.get_attn_backend().get_builder_cls()(
                self.specs[name], [name], self.config, torch.device("cpu")
            )
            metadata[name] = builder.build(common)
        total = len(positions) + padding
        context = ForwardContext(self.caches, metadata, slots, {}, num_tokens=total)
        return context, torch.from_numpy(np.concatenate([positions, np.zeros(padding, np.int64)]))

    @torch.inference_mode()
    def step(
        self,
        chunks: Sequence[tuple[int, int, int]],
        streams: Sequence[Tensor],
        width: int = 1,
        padding: int = 0,
    ) -> Tensor:
        """Outputs `[tokens, hidden]` of the chunks of `streams`, hidden states by sequence."""
        context, positions = self.context(chunks, width, padding)
        rows = [streams[seq][start : start + length] for seq, start, length in chunks]
        rows.append(torch.full((padding, rows[0].shape[1]), torch.nan))
        with set_forward_context(context):
            out: Tensor = self.layer(positions, torch.cat(rows))
        return out[: len(out) - padding]


def expected(layer: CompressedAttention, x: Tensor) -> Tensor:
    """`[tokens, hidden]` fp64 of one whole sequence, token by token."""
    s, weights = layer.shape, {n: p.double() for n, p in layer.named_parameters()}
    x = x.double()
    ratio = s.ratio
    qr = _norm(x @ weights["wq_a.weight"].T, weights["q_norm.weight"], s.eps)
    q = (qr @ weights["wq_b.weight"].T).unflatten(-1, (s.num_heads, s.head_dim))
    q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + s.eps)
    kv = _norm(x @ weights["wkv.weight"].T, weights["kv_norm.weight"], s.eps)
    entries = keys = None
    if ratio:
        entries = _compress(weights, "compressor", x, ratio, layer.rope, s.eps)
    if ratio == 4:
        keys = _compress(weights, "indexer.compressor", x, ratio, layer.rope, s.eps)
        iq = (qr @ weights["indexer.wq_b.weight"].T).unflatten(-1, (s.index_heads, s.index_dim))
        iw = x @ weights["indexer.weights_proj.weight"].T * s.index_heads**-0.5
    kv = torch.stack([_turn(row, j, layer.rope) for j, row in enumerate(kv)])
    out = torch.empty(len(x), s.num_heads, s.head_dim, dtype=torch.float64)
    for t in range(len(x)):
        seen = [*kv[max(0, t - s.window + 1) : t + 1]]
        if entries is not None:
            visible = list(range((t + 1) // ratio))
            if keys is not None and visible:
                query = _turn(iq[t], t, layer.rope)
                found = (query @ torch.stack(keys[: len(visible)]).T).relu() * s.index_dim**-0.5
                score = (iw[t] @ found).tolist()
                visible = sorted(visible, key=lambda w: -score[w])[: s.index_topk]
            seen += [entries[w] for w in visible]
        rows = torch.stack(seen)
        scores = _turn(q[t], t, layer.rope) @ rows.T * s.head_dim**-0.5
        both = torch.cat([scores, weights["attn_sink"][:, None]], dim=1).softmax(1)
        out[t] = _turn(both[:, :-1] @ rows, t, layer.rope, sign=-1)
    low = weights["wo_a.weight"].unflatten(0, (s.output_groups, s.output_low_rank))
    groups = out.flatten(1).unflatten(1, (s.output_groups, -1))
    made = [groups[:, g] @ low[g].T for g in range(s.output_groups)]
    return torch.cat(made, dim=-1) @ weights["wo_b.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _turn(x: Tensor, position: int, rope: RotaryEmbedding, sign: int = 1) -> Tensor:
    """The last dimensions of each row as complex numbers, turned."""
    angles = rope.cos_sin_cache[position].double()
    half = len(angles) // 2
    cos, sin = angles[:half], sign * angles[half:]
    out, start = x.clone(), x.shape[-1] - 2 * half
    first, second = x[..., start::2], x[..., start + 1 :: 2]
    out[..., start::2] = first * cos - second * sin
    out[..., start + 1 :: 2] = first * sin + second * cos
    return out


def _compress(
    weights: dict[str, Tensor], name: str, x: Tensor, ratio: int, rope: RotaryEmbedding, eps: float
) -> list[Tensor]:
    """The entries of all complete windows, channel by channel."""
    norm, ape = weights[f"{name}.norm.weight"], weights[f"{name}.ape"]
    a = x @ weights[f"{name}.wkv.weight"].T
    b = x @ weights[f"{name}.wgate.weight"].T
    width = len(norm)
    entries = []
    for w in range(len(x) // ratio):
        own = [(t, width if ratio == 4 else 0) for t in range(w * ratio, (w + 1) * ratio)]
        before = [(t, 0) for t in range((w - 1) * ratio, w * ratio) if ratio == 4 and w]
        entry = torch.empty(width, dtype=torch.float64)
        for c in range(width):
            scores = [float(b[t, at + c] + ape[t % ratio, at + c]) for t, at in before + own]
            values = [float(a[t, at + c]) for t, at in before + own]
            most = max(scores)
            shares = [math.exp(score - most) for score in scores]
            total = sum(p * v for p, v in zip(shares, values, strict=True))
            entry[c] = total / sum(shares)
        entries.append(_turn(_norm(entry, norm, eps), w * ratio, rope))
    return entries
