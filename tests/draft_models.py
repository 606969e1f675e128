# SPDX-License-Identifier: Apache-2.0
"""Draft checkpoints for tiny targets, and what their heads compute, in plain torch at any dtype.

`gen` makes tensors that follow from their names, so that results can be written down as numbers.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE, hf_model

_GOLDEN, _A, _B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gen(name: str, shape: Sequence[int], amp: float, center: float = 0.0) -> Tensor:
    """fp64 numbers in `center +- amp`, by a splitmix64 finaliser of name and index."""
    count = int(np.prod(shape))
    seed = np.uint64(zlib.crc32(name.encode()) << 32)
    with np.errstate(over="ignore"):
        z = seed + np.arange(count, dtype=np.uint64) + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_A)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_B)
        z ^= z >> np.uint64(31)
    unit = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(center + amp * (2 * unit - 1)).view(*shape)


@dataclass(frozen=True)
class Shape:
    """Sizes of a draft layer."""

    hidden: int = 64
    intermediate: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 256
    draft_vocab: int = 96
    num_aux: int = 3
    #: draft id i stands for 2 i + i % modulus
    modulus: int = 2


def layer_shapes(shape: Shape, prefix: str, inputs: int, gated: bool) -> dict[str, list[int]]:
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        f"{prefix}input_layernorm.weight": [shape.hidden],
        f"{prefix}post_attention_layernorm.weight": [shape.hidden],
        f"{prefix}self_attn.q_proj.weight": [q * (2 if gated else 1), inputs],
        f"{prefix}self_attn.k_proj.weight": [kv, inputs],
        f"{prefix}self_attn.v_proj.weight": [kv, inputs],
        f"{prefix}self_attn.o_proj.weight": [shape.hidden, q],
        f"{prefix}mlp.gate_proj.weight": [shape.intermediate, shape.hidden],
        f"{prefix}mlp.up_proj.weight": [shape.intermediate, shape.hidden],
        f"{prefix}mlp.down_proj.weight": [shape.hidden, shape.intermediate],
    }


def eagle3_tensors(shape: Shape, flags: dict[str, bool], layers: int = 1) -> dict[str, Tensor]:
    """An EAGLE-3 checkpoint's tensors, fp64."""
    h, wide = shape.hidden, shape.num_aux * shape.hidden
    shapes: dict[str, list[int]] = {
        "fc.weight": [h, wide],
        "layers.0.hidden_norm.weight": [h],
        "norm.weight": [h],
        "embed_tokens.weight": [shape.vocab, h],
        "lm_head.weight": [shape.draft_vocab, h],
    }
    for i in range(layers):
        shapes |= layer_shapes(shape, f"layers.{i}.", 2 * h if i == 0 else h, gated=False)
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = [wide]
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": [h] for i in range(shape.num_aux)}
    tensors = {}
    for name, size in shapes.items():
        amp, center = (0.25, 1.0) if len(size) == 1 else (0.2, 0.0)
        amp = 1.0 if name == "embed_tokens.weight" else amp
        tensors[name] = gen(f"e3.{name}", size, amp, center)
    if shape.draft_vocab != shape.vocab:
        ids = torch.arange(shape.draft_vocab)
        targets = 2 * ids + ids % shape.modulus
        tensors["d2t"] = targets - ids
        if shape.modulus == 2:
            tensors["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, targets, True)
    return tensors


def mtp_tensors(shape: Shape) -> dict[str, Tensor]:
    """The `mtp.*` tensors of a Qwen3.5 checkpoint, fp64."""
    h = shape.hidden
    shapes: dict[str, list[int]] = {
        "mtp.fc.weight": [h, 2 * h],
        "mtp.pre_fc_norm_embedding.weight": [h],
        "mtp.pre_fc_norm_hidden.weight": [h],
        "mtp.norm.weight": [h],
        "mtp.layers.0.self_attn.q_norm.weight": [shape.head_dim],
        "mtp.layers.0.self_attn.k_norm.weight": [shape.head_dim],
    } | layer_shapes(shape, "mtp.layers.0.", h, gated=True)
    return {name: gen(name, size, 0.25 if len(size) == 1 else 0.2) for name, size in shapes.items()}


def write_eagle3(
    path: Path,
    verifier: Path | None,
    shape: Shape,
    flags: dict[str, bool] | None = None,
    *,
    layers: int = 1,
    tensors: dict[str, Tensor] | None = None,
    num_tokens: int = 3,
    layer_ids: Sequence[int] | None = (1, 2, 3),
    **layer_config: Any,
) -> Path:
    """A speculators checkpoint in fp32."""
    path.mkdir(parents=True, exist_ok=True)
    flags = flags or {}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None if layer_ids is None else list(layer_ids),
        **flags,
        "speculators_config": speculators_config("eagle3", verifier, num_tokens),
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **layer_config,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    found = tensors or eagle3_tensors(shape, flags, layers)
    stored = {k: t.float() if t.is_floating_point() else t for k, t in found.items()}
    save_file({k: t.contiguous() for k, t in stored.items()}, path / "model.safetensors")
    return path


def speculators_config(kind: str, verifier: Path | None, num_tokens: int) -> dict[str, Any]:
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
        "verifier": {"name_or_path": None if verifier is None else str(verifier)},
    }


def with_mtp(target: Path, path: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy of a Qwen3.5 checkpoint with a head."""
    shutil.copytree(target, path, dirs_exist_ok=True)
    stored = load_file(path / "model.safetensors")
    stored |= {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return path


def write_speculators_mtp(
    path: Path, verifier: Path, tensors: dict[str, Tensor], num_tokens: int = 3
) -> Path:
    """The same head as speculators stores it."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "speculators_config": speculators_config("mtp", verifier, num_tokens),
        "transformer_layer_config": {"model_type": "qwen3_5_text"},
    }
    (path / "config.json").write_text(json.dumps(config))
    renamed = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("mtp.").removeprefix("layers.0.")
        for old, new in (
            ("fc.", "input_proj."),
            ("pre_fc_norm_hidden.", "hidden_layernorm."),
            ("pre_fc_norm_embedding.", "token_layernorm."),
        ):
            own = new + own.removeprefix(old) if own.startswith(old) else own
        own = "final_layernorm.weight" if name == "mtp.norm.weight" else own
        renamed[f"mtp_layers.0.{own}"] = tensor.float().contiguous()
    save_file(renamed, path / "model.safetensors")
    return path


# ---- what the heads compute ----------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, one_plus: bool = False) -> Tensor:
    scale = 1 + weight if one_plus else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def rotate(x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """NeoX rotation of `x [n, heads, head_dim]`."""
    half = rotary_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions[:, None].to(x.dtype) * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:rotary_dim]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], dim=-1)


@dataclass
class Rows:
    """Keys and values of the rows so far, `[n, kv heads, head_dim]`, by layer."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def first(self, count: int) -> Rows:
        return Rows([k[:count] for k in self.keys], [v[:count] for v in self.values])

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k])
            self.values[layer] = torch.cat([self.values[layer], v])
        return self.keys[layer], self.values[layer]


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The last `len(q)` rows attend to all up to themselves: `[n, heads, head_dim]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    own = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = own < 0
    if window is not None:
        hidden = hidden | (own >= window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class HeadReference:
    """Subclasses give `step`. `embed [vocab, hidden]`; `tensors` of the head."""

    to_target: Tensor | None = None

    def __init__(self, tensors: dict[str, Tensor], embed: Tensor, head: Tensor) -> None:
        self.dtype = embed.dtype
        self.t = {
            name: x.to(self.dtype) if x.is_floating_point() else x for name, x in tensors.items()
        }
        self.embed, self.head = embed, head

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Logits `[n, draft vocab]` and the next hidden state; `rows` grows."""
        raise NotImplementedError

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.t[f"{name}.weight"].T

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(x, f"{prefix}mlp.gate_proj"))
        return self.linear(gate * self.linear(x, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")

    def chain(
        self, hidden: Tensor, tokens: Tensor, num_drafts: int
    ) -> tuple[list[int], list[Tensor]]:
        """Target ids and logits of greedy drafts after rows `hidden [n, hidden]`, each with the
        token after it, `tokens [n]`."""
        rows = Rows()
        count = len(tokens)
        logits, h = self.step(hidden, tokens, torch.arange(count), rows)
        return self._on(rows, logits[-1:], h[-1:], count, num_drafts)

    def chains(
        self, hidden: Tensor, tokens: Tensor, num_drafts: int, after: Sequence[int]
    ) -> dict[int, tuple[list[int], list[Tensor]]]:
        """`chain` of the first `n` rows, for every `n` of `after`."""
        rows = Rows()
        logits, h = self.step(hidden, tokens, torch.arange(len(tokens)), rows)
        return {
            n: self._on(rows.first(n), logits[n - 1 : n], h[n - 1 : n], n, num_drafts)
            for n in after
        }

    def _on(
        self, rows: Rows, logits: Tensor, h: Tensor, position: int, num_drafts: int
    ) -> tuple[list[int], list[Tensor]]:
        drafts, kept = [], []
        for j in range(num_drafts):
            kept.append(logits[0])
            best = logits.argmax(-1)
            token = best if self.to_target is None else self.to_target[best]
            drafts.append(int(token))
            if j + 1 < num_drafts:
                logits, h = self.step(h, token, torch.tensor([position + j]), rows)
        return drafts, kept


class Eagle3Reference(HeadReference):
    """`flags` as in the checkpoint's config; `window` of all layers."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        shape: Shape,
        flags: dict[str, bool],
        dtype: torch.dtype = torch.float64,
        window: int | None = None,
    ) -> None:
        embed = tensors["embed_tokens.weight"].to(dtype)
        super().__init__(tensors, embed, tensors["lm_head.weight"].to(dtype))
        self.shape, self.flags, self.window = shape, flags, window
        if "d2t" in tensors:
            self.to_target = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        if self.flags.get("fc_norm"):
            aux = [rms(x, self.t[f"fc_norm.{i}.weight"]) for i, x in enumerate(aux)]
        joined = torch.cat(aux, dim=-1)
        if self.flags.get("norm_before_fc"):
            joined = rms(joined, self.t["input_norm.weight"])
        return self.linear(joined, "fc")

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        normed = rms(hidden, self.t["layers.0.hidden_norm.weight"])
        e = rms(self.embed[tokens], self.t["layers.0.input_layernorm.weight"])
        z = normed if self.flags.get("norm_before_residual") else hidden
        layer = 0
        while f"layers.{layer}.self_attn.q_proj.weight" in self.t:
            prefix = f"layers.{layer}."
            x = torch.cat([e, normed], dim=-1)
            if layer:
                x = rms(z, self.t[f"{prefix}input_layernorm.weight"])
            z = z + self._attention(x, prefix, positions, rows, layer)
            z = z + self.mlp(rms(z, self.t[f"{prefix}post_attention_layernorm.weight"]), prefix)
            layer += 1
        out = rms(z, self.t["norm.weight"])
        return out @ self.head.T, out if self.flags.get("norm_output") else z

    def _attention(
        self, x: Tensor, prefix: str, positions: Tensor, rows: Rows, layer: int
    ) -> Tensor:
        s = self.shape
        parts = [self.linear(x, f"{prefix}self_attn.{p}_proj") for p in "qkv"]
        q, k, v = (part.view(len(x), -1, s.head_dim) for part in parts)
        if f"{prefix}self_attn.q_norm.weight" in self.t:
            q = rms(q, self.t[f"{prefix}self_attn.q_norm.weight"])
            k = rms(k, self.t[f"{prefix}self_attn.k_norm.weight"])
        q = rotate(q, positions, s.head_dim, 10000.0)
        k, v = rows.add(layer, rotate(k, positions, s.head_dim, 10000.0), v)
        return self.linear(_attend(q, k, v, self.window).flatten(1), f"{prefix}self_attn.o_proj")


class MtpReference(HeadReference):
    """Embedding and output head are the target's."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        shape: Shape,
        embed: Tensor,
        head: Tensor,
        rotary_dim: int,
        theta: float,
    ) -> None:
        super().__init__(tensors, embed, head)
        self.shape, self.rotary_dim, self.theta = shape, rotary_dim, theta

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.t[f"mtp.{name}.weight"], one_plus=True)

    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        return hidden

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        token = self.norm(self.embed[tokens], "pre_fc_norm_embedding")
        x = torch.cat([token, self.norm(hidden, "pre_fc_norm_hidden")], dim=-1)
        x = self.linear(x, "mtp.fc")
        normed = self.norm(x, "layers.0.input_layernorm")
        x = x + self._attention(normed, positions, rows)
        x = x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"), "mtp.layers.0.")
        y = self.norm(x, "norm")
        return y @ self.head.T, y

    def _attention(self, x: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        size, prefix = self.shape.head_dim, "mtp.layers.0.self_attn."
        both = self.linear(x, f"{prefix}q_proj").view(len(x), -1, 2, size)
        q, gate = both[:, :, 0], both[:, :, 1]
        k = self.linear(x, f"{prefix}k_proj").view(len(x), -1, size)
        v = self.linear(x, f"{prefix}v_proj").view(len(x), -1, size)
        q = self.norm(q, "layers.0.self_attn.q_norm")
        k = self.norm(k, "layers.0.self_attn.k_norm")
        q = rotate(q, positions, self.rotary_dim, self.theta)
        k, v = rows.add(0, rotate(k, positions, self.rotary_dim, self.theta), v)
        out = _attend(q, k, v, None) * gate.sigmoid()
        return self.linear(out.flatten(1), f"{prefix}o_proj")


# ---- heads of tiny targets -----------------------------------------------------------------------

#: of the families in `tiny_models` with hidden size 64
TINY = Shape(intermediate=96, head_dim=32, vocab=VOCAB_SIZE, draft_vocab=120)


@torch.no_grad()
def target_streams(path: Path, token_ids: list[int], ids: Sequence[int]) -> list[Tensor]:
    """transformers' residual streams after `ids` layers, then the normed last one, each fp32
    `[tokens, hidden]`; ids below the number of layers."""
    model = hf_model(path)
    found = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [found[i][0] for i in (*ids, -1)]
