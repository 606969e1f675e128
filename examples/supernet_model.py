# SPDX-License-Identifier: Apache-2.0
"""A small Apriel2 supernet that can be trained: every layer has four token mixers, and a training
step draws one of them for each layer. Parameters have the names of Apriel2 checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

EPS, CHUNK, TAPS = 1e-5, 16, 4
Description = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Heads of `head_dim` in every mixer; attention and gated delta nets share keys in pairs."""

    vocab: int
    context: int
    hidden: int = 256
    mlp: int = 512
    layers: int = 4
    heads: int = 4
    head_dim: int = 32
    window: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def mixers(self) -> dict[str, Description]:
        """The mixers of every layer, as `config.json` describes them."""
        heads, pairs, dim = self.heads, self.heads // 2, self.head_dim
        rotary = {"type": "mistral_1d", "theta": 10000.0}
        attention = {"type": "attention", "heads": heads, "head_groups": pairs, "head_size": dim}
        attention |= {"rotary": rotary, "add_linear_biases": False}
        gdn = {"type": "gdn", "value_heads": heads, "key_heads": pairs}
        gdn |= {"key_head_dim": dim, "value_head_dim": dim}
        return {
            "attention": attention,
            "sliding_window": {**attention, "window_size": self.window},
            "gdn": {**gdn, "convolution_layer": {"kernel_size": TAPS}},
            "kda": {
                "type": "kda",
                "heads": heads,
                "head_dim": dim,
                "convolution_layer": {"kernel_size": TAPS},
                "normalization": {"epsilon": EPS},
            },
        }


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in chunks (arXiv 2412.06464, 2510.26692): `q, k, v, g [batch, heads,
    tokens, dim]` with `g` log decays per key channel, `beta [batch, heads, tokens]`; tokens are a
    multiple of the chunk. Returns `[batch, heads, tokens, dim]`."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v, g = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))
    beta = beta.unflatten(2, (-1, CHUNK)).unsqueeze(-1)
    total = g.cumsum(-2)
    order = torch.arange(CHUNK, device=q.device)
    earlier = order[:, None] >= order
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(
        ~earlier[..., None], -torch.inf
    )
    keys = k.unsqueeze(-3) * between.exp()
    among = beta * torch.einsum("...id,...ijd->...ij", k, keys).tril(-1)
    reads = torch.einsum("...id,...ijd->...ij", q, keys)
    right = torch.cat([beta * v, beta * k * total.exp()], dim=-1)
    eye = torch.eye(CHUNK, device=q.device)
    u, w = torch.linalg.solve_triangular(eye + among, right, upper=False).chunk(2, dim=-1)
    end = total[..., -1:, :]
    kept, queries = k * (end - total).exp(), q * total.exp()
    batch = q.shape[:2]
    parts = (x.flatten(0, 1).unbind(1) for x in (u, w, kept.mT, end.mT.exp()))
    state = u.new_zeros(batch.numel(), q.shape[-1], v.shape[-1])
    states, updates = [], []
    for right, left, key, decay in zip(*parts, strict=True):
        states.append(state)
        updates.append(torch.baddbmm(right, left, state, alpha=-1))
        state = torch.baddbmm(decay * state, key, updates[-1])
    before, update = (torch.stack(x, dim=1).unflatten(0, batch) for x in (states, updates))
    return (queries @ before + reads @ update).flatten(2, 3)


def _linear(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


def _taps(channels: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, TAPS, groups=channels, bias=False)


def _convolved(taps: nn.Conv1d, x: Tensor) -> Tensor:
    """`x [batch, tokens, channels]`; the last tap is the current token's."""
    return F.silu(taps(F.pad(x.mT, (TAPS - 1, 0)))).mT


class Attention(nn.Module):
    """Grouped queries, rotary positions, a window if there is one."""

    def __init__(self, sizes: Sizes, window: int | None = None) -> None:
        super().__init__()
        self.sizes, self.window = sizes, window
        self.q_proj = _linear(sizes.hidden, sizes.width)
        self.k_proj = _linear(sizes.hidden, sizes.width // 2)
        self.v_proj = _linear(sizes.hidden, sizes.width // 2)
        self.o_proj = _linear(sizes.width, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        dim, tokens = self.sizes.head_dim, x.shape[1]
        q, k, v = (
            p(x).unflatten(-1, (-1, dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        position = torch.arange(tokens, device=x.device)
        rates = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
        angles = position[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(y.dtype)

        back = position[:, None] - position
        seen = (back >= 0) & (back < (self.window or tokens))
        k, v = turned(k).repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        out = F.scaled_dot_product_attention(turned(q), k, v.to(k.dtype), attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _Recurrent(nn.Module):
    """What both delta rules share: heads, decays, the gated norm."""

    def __init__(self, sizes: Sizes, decays: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.A_log = nn.Parameter(torch.rand(sizes.heads).mul(4).add(1).log())
        self.dt_bias = nn.Parameter(torch.rand(decays) * 2 - 4)
        self.norm = nn.RMSNorm(sizes.head_dim, EPS)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, z: Tensor) -> Tensor:
        """All `[batch, tokens, channels]`; `f` are decays before their activation, per head or per
        channel."""
        dim, tokens = self.sizes.head_dim, q.shape[1]
        f = F.softplus(f.float() + self.dt_bias).unflatten(-1, (self.sizes.heads, -1))
        g = (-self.A_log.float().exp()[:, None] * f).expand(*f.shape[:3], dim)
        q, k, v = (x.float().unflatten(-1, (-1, dim)) for x in (q, k, v))
        repeat = self.sizes.heads // k.shape[2]
        q, k = (x.repeat_interleave(repeat, dim=2) for x in (q, k))
        padding = (0, 0, 0, 0, 0, -tokens % CHUNK)
        q, k, v, g = (F.pad(x, padding).transpose(1, 2) for x in (q, k, v, g))
        beta = F.pad(b.float().sigmoid(), (0, 0, 0, -tokens % CHUNK)).mT
        with torch.autocast(q.device.type, enabled=False):
            y = delta_rule(q, k, v, g, beta).transpose(1, 2)[:, :tokens]
        y = self.norm(y.to(self.norm.weight.dtype)) * F.silu(z.unflatten(-1, (-1, dim)))
        return y.flatten(2).to(z.dtype)


class GatedDeltaNet(_Recurrent):
    """One convolution over queries, keys and values; a decay per head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, sizes.heads)
        self.parts = [sizes.width // 2, sizes.width // 2, sizes.width]
        self.in_proj_qkvz = _linear(sizes.hidden, sum(self.parts) + sizes.width)
        self.in_proj_ba = _linear(sizes.hidden, 2 * sizes.heads)
        self.convolution = _taps(sum(self.parts))
        self.out_proj = _linear(sizes.width, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv, z = self.in_proj_qkvz(x).split([sum(self.parts), self.sizes.width], dim=-1)
        q, k, v = _convolved(self.convolution, qkv).split(self.parts, dim=-1)
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)
        return self.out_proj(self.mixed(q, k, v, a, b, z))


class KimiDeltaAttention(_Recurrent):
    """A convolution each; a decay per channel, of low rank as the gate."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, sizes.width)
        for name in "qkv":
            setattr(self, f"{name}_proj", _linear(sizes.hidden, sizes.width))
            setattr(self, f"{name}_conv", _taps(sizes.width))
        for name in "fg":
            setattr(self, f"{name}_a_proj", _linear(sizes.hidden, sizes.head_dim))
            setattr(self, f"{name}_b_proj", _linear(sizes.head_dim, sizes.width))
        self.beta_proj = _linear(sizes.hidden, sizes.heads)
        self.o_proj = _linear(sizes.width, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        part = self.get_submodule
        q, k, v = (_convolved(part(f"{n}_conv"), part(f"{n}_proj")(x)) for n in "qkv")
        f, z = (part(f"{n}_b_proj")(part(f"{n}_a_proj")(x)) for n in "fg")
        return self.o_proj(self.mixed(q, k, v, f, self.beta_proj(x), z))


class _Mixers(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.mixers = nn.ModuleDict(
            {
                "attention": Attention(sizes),
                "sliding_window": Attention(sizes, sizes.window),
                "gdn": GatedDeltaNet(sizes),
                "kda": KimiDeltaAttention(sizes),
            }
        )


class _MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (_linear(sizes.hidden, sizes.mlp) for _ in range(2))
        self.down_proj = _linear(sizes.mlp, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.mixer, self.mlp = _Mixers(sizes), _MLP(sizes)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(sizes.hidden, EPS) for _ in range(2)
        )

    def forward(self, x: Tensor, mixer: str) -> Tensor:
        x = x + self.mixer.mixers[mixer](self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class Scored:
    """Mean next-token loss in nats."""

    loss: Tensor


class Supernet(nn.Module):
    """Called with ids `[batch, tokens]`, which are the labels, too. A step with gradients draws the
    mixer of each layer; others use `placement`."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        self.names = list(sizes.mixers())
        self.placement = [self.names[0]] * sizes.layers
        self.embed_tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.decoder = nn.ModuleDict(
            {"blocks": nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))}
        )
        self.norm = nn.RMSNorm(sizes.hidden, EPS)
        self._generator = torch.Generator().manual_seed(seed)

    def silence_blocks(self) -> None:
        """Blocks add nothing at first: what a layer reads is the same whatever was drawn before it.
        Without this training rests at the frequencies of tokens for its first 150 steps."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)

    def logits(self, ids: Tensor, placement: list[str]) -> Tensor:
        """`[batch, tokens, vocab]`."""
        x = self.embed_tokens(ids)
        for block, mixer in zip(self.decoder["blocks"], placement, strict=True):
            x = block(x, mixer)
        return self.norm(x) @ self.embed_tokens.weight.T

    def forward(self, ids: Tensor, labels: Tensor) -> Scored:
        placement = self.placement
        if torch.is_grad_enabled():
            drawn = torch.randint(len(self.names), (self.sizes.layers,), generator=self._generator)
            placement = [self.names[i] for i in drawn.tolist()]
        logits = self.logits(ids, placement)[:, :-1].float()
        return Scored(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))

    def save_pretrained(self, path: Path) -> None:
        """An `apriel2_text` checkpoint."""
        sizes, norm = self.sizes, {"type": "rms_norm", "epsilon": EPS}
        mlp = {"type": "mlp", "intermediate_size": sizes.mlp, "activation": "silu", "gated": True}
        mixer = {"type": "stochastic", "main_mixer_name": "attention", "mixers": sizes.mixers()}
        block = {"mixer": mixer, "mlp": mlp, "normalization": norm}
        config = {
            "model_type": "apriel2_text",
            "architectures": ["Apriel2ForCausalLM"],
            "torch_dtype": str(self.norm.weight.dtype).removeprefix("torch."),
            "hidden_size": sizes.hidden,
            "vocab_size": sizes.vocab,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "embeddings": {"max_position_embeddings": sizes.context},
            "head": {"normalization": norm},
            "decoder": {"type": "fixed", "num_blocks": sizes.layers, "block": block},
        }
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tensors = {f"model.{k}": v.cpu().contiguous() for k, v in self.state_dict().items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
