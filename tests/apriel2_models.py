# SPDX-License-Identifier: Apache-2.0
"""Tiny Apriel2 checkpoints, and the equations of the model in fp64, token by token.

The reference shares no code with the engine and knows only the checkpoint's names. Weights follow
the advice for such tests: gates, decays and taps are random and far from their trained start, so
that a dropped gate, norm or state changes the outputs; every mixer of a supernet has its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from tests.tiny_models import EOS_TOKEN_ID, MAX_POSITION, PAD_TOKEN_ID, VOCAB_SIZE, _tokenizer

HIDDEN, MLP, WINDOW = 64, 96, 8
Tensors = dict[str, Tensor]
Description = dict[str, Any]

#: not the base that `get_rope` takes by default, and another one for windows
ROTARY = {"type": "mistral_1d", "theta": 500.0}
WINDOW_ROTARY = {"type": "mistral_1d", "theta": 30000.0}
MIXERS: dict[str, Description] = {
    "attention": {
        "type": "attention",
        "heads": 4,
        "head_groups": 2,
        "head_size": 16,
        "add_linear_biases": False,
        "rotary": ROTARY,
    },
    "sliding_window": {
        "type": "attention",
        "heads": 4,
        "head_groups": 2,
        "head_size": 16,
        "window_size": WINDOW,
        "rotary": WINDOW_ROTARY,
        "query_layer": {"bias": {"enabled": True}},
        "value_layer": {"bias": {"enabled": True}},
        "dense_layer": {"bias": {"enabled": True}},
    },
    "gdn": {
        "type": "gdn",
        "value_heads": 4,
        "key_heads": 2,
        "key_head_dim": 16,
        "value_head_dim": 24,
        "convolution_layer": {"kernel_size": 4},
    },
    "kda": {
        "type": "kda",
        "heads": 4,
        "head_dim": 16,
        "convolution_layer": {"kernel_size": 4},
        "normalization": {"epsilon": 1e-5},
    },
}

#: not in `MIXERS`: supernets have the others
MAMBA: dict[str, Description] = {
    name: {
        "type": "mamba",
        "state_size": 8,
        "d_inner": 64,
        "d_xb": 32,
        "d_conv": 4,
        "dt_rank": 5,
        "conv_bias": bias,
        "dt_proj_bias": bias,
        "repeat_kv_before_conv": first,
    }
    for name, bias, first in (("mamba", True, True), ("mamba_after", False, False))
}


def block(mixer: Description) -> Description:
    mlp = {"type": "mlp", "intermediate_size": MLP, "activation": "silu", "gated": True}
    norm = {"type": "rms_norm", "epsilon": 1e-5}
    return {"mixer": mixer, "mlp": mlp, "normalization": norm}


def pattern(names: list[str], mixers: Mapping[str, Description] = MIXERS) -> Description:
    """A decoder whose layers have these mixers, under these names."""
    blocks = {name: block(mixers[name]) for name in dict.fromkeys(names)}
    return {"type": "pattern", "num_blocks": len(names), "pattern": names, "blocks": blocks}


def fixed(mixer: Description, num_blocks: int) -> Description:
    return {"type": "fixed", "num_blocks": num_blocks, "block": block(mixer)}


def stochastic(
    num_blocks: int, mixers: Mapping[str, Description] = MIXERS, main: str = "attention"
) -> Description:
    """A supernet's decoder."""
    kinds = {"type": "stochastic", "main_mixer_name": main, "mixers": dict(mixers)}
    return fixed(kinds, num_blocks)


def thinned() -> Description:
    """A supernet's decoder of which blocks keep different mixers, one of them called as its own
    block is, and the last layer has no choice. It starts with `gdn,kda,_`."""

    def several(*names: str) -> Description:
        return stochastic(1, {name: MIXERS[name] for name in names}, main=names[-1])["block"]

    blocks = {"layer_0": several("attention", "gdn"), "gdn": several("gdn", "kda")}
    blocks["attention"] = block(MIXERS["attention"])
    return {"type": "pattern", "num_blocks": 3, "pattern": [*blocks], "blocks": blocks}


def mixers_of(decoder: Description, layer: int) -> dict[str, Description]:
    """A layer's mixers by name; that of a plain block is called ""."""
    described = decoder.get("block")
    if described is None:
        names = decoder["pattern"]
        described = decoder["blocks"][names[layer % len(names)]]
    mixer = described["mixer"]
    return mixer["mixers"] if mixer["type"] == "stochastic" else {"": mixer}


def _shapes(mixer: Description) -> dict[str, tuple[int, ...]]:
    if mixer["type"] == "attention":
        heads, groups, size = mixer["heads"], mixer["head_groups"], mixer["head_size"]
        rows = {"q": heads * size, "k": groups * size, "v": groups * size}
        shapes: dict[str, tuple[int, ...]] = {
            f"{n}_proj.weight": (r, HIDDEN) for n, r in rows.items()
        }
        shapes["o_proj.weight"] = (HIDDEN, heads * size)
        parts = {"q": "query", "k": "key", "v": "value", "o": "dense"}
        for name, part in parts.items():
            stated = mixer.get(f"{part}_layer", {}).get("bias", {}).get("enabled")
            if mixer.get("add_linear_biases") if stated is None else stated:
                shapes[f"{name}_proj.bias"] = (rows.get(name, HIDDEN),)
        return shapes
    if mixer["type"] == "gdn":
        heads, taps = mixer["value_heads"], mixer["convolution_layer"]["kernel_size"]
        keys = mixer["key_heads"] * mixer["key_head_dim"]
        values = heads * mixer["value_head_dim"]
        return {
            "in_proj_qkvz.weight": (2 * keys + 2 * values, HIDDEN),
            "in_proj_ba.weight": (2 * heads, HIDDEN),
            "convolution.weight": (2 * keys + values, 1, taps),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (mixer["value_head_dim"],),
            "out_proj.weight": (HIDDEN, values),
        }
    if mixer["type"] == "mamba":
        inner, shared = mixer["d_inner"], mixer["d_xb"]
        channels = inner if mixer["repeat_kv_before_conv"] else shared
        biases = {"conv1d.bias": (channels,)} if mixer["conv_bias"] else {}
        biases |= {"dt_proj.bias": (inner,)} if mixer["dt_proj_bias"] else {}
        return {
            "in_proj.weight": (2 * inner + 2 * shared, HIDDEN),
            "dt_in_proj.weight": (mixer["dt_rank"], HIDDEN),
            "dt_proj.weight": (inner, mixer["dt_rank"]),
            "conv1d.weight": (channels, 1, mixer["d_conv"]),
            "A_log": (inner, mixer["state_size"]),
            "D": (inner,),
            "out_proj.weight": (HIDDEN, inner),
            **biases,
        }
    heads, dim = mixer["heads"], mixer["head_dim"]
    width, taps = heads * dim, mixer["convolution_layer"]["kernel_size"]
    return {
        **{f"{n}_proj.weight": (width, HIDDEN) for n in "qkv"},
        **{f"{n}_conv.weight": (width, 1, taps) for n in "qkv"},
        **{f"{n}_a_proj.weight": (dim, HIDDEN) for n in "fg"},
        **{f"{n}_b_proj.weight": (width, dim) for n in "fg"},
        "beta_proj.weight": (heads, HIDDEN),
        "A_log": (heads,),
        "dt_bias": (width,),
        "norm.weight": (dim,),
        "o_proj.weight": (HIDDEN, width),
    }


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator)
    if name.endswith(("A_log", "dt_bias")):
        return uniform * 2 - 3  # decays near 1: the state matters for long
    if name.endswith(("norm.weight", "layernorm.weight")):
        return 1 + (uniform * 2 - 1) * 0.3
    if "embed_tokens" in name:
        return torch.randn(shape, generator=generator) / 2
    gain = 3.0 if "mixer" in name else 2.0
    return (uniform * 2 - 1) * gain * shape[-1] ** -0.5 if len(shape) > 1 else uniform - 0.5


def make_tensors(decoder: Description, tied: bool = False, seed: int = 0) -> Tensors:
    """Random weights, fp32, under the checkpoint's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB_SIZE, HIDDEN)
    for layer in range(decoder["num_blocks"]):
        prefix = f"model.decoder.blocks.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
        for name in ("gate_proj", "up_proj", "down_proj"):
            turned = name == "down_proj"
            shapes[f"{prefix}mlp.{name}.weight"] = (HIDDEN, MLP) if turned else (MLP, HIDDEN)
        for name, mixer in mixers_of(decoder, layer).items():
            inner = f"mixer.mixers.{name}." if name else "mixer."
            shapes |= {f"{prefix}{inner}{key}": s for key, s in _shapes(mixer).items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: _draw(name, shape, generator) for name, shape in shapes.items()}


def save(path: Path, decoder: Description, tensors: Tensors, **fields: Any) -> Path:
    """A checkpoint directory with tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "apriel2_text",
        "architectures": ["Apriel2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_apriel2.Apriel2TextConfig"},
        "torch_dtype": "float32",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "embeddings": {"max_position_embeddings": MAX_POSITION},
        "head": {"normalization": {"type": "rms_norm", "epsilon": 1e-5}},
        "decoder": decoder,
        **fields,
    }
    (path / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save_pretrained(path)
    return path


# ---- the equations -------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def convolution(x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [tokens, channels]`, `taps [channels, 1, width]`; the last tap is the current token's."""
    width = taps.shape[-1]
    padded = pad(x, (0, 0, width - 1, 0))
    y = sum(taps[:, 0, j] * padded[j : j + len(x)] for j in range(width))
    return silu(y if bias is None else y + bias)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Of one head: `q, k [tokens, dk]`, `v [tokens, dv]`, `g` a log decay per token, or per token
    and key channel. Outputs `[tokens, dv]` and the final state `[dk, dv]`."""
    state, outputs = q.new_zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        query = q[t] / (q[t].square().sum() + 1e-6).sqrt() * q.shape[1] ** -0.5
        key = k[t] / (k[t].square().sum() + 1e-6).sqrt()
        decay = g[t].exp()
        state = decay * state if decay.dim() == 0 else decay[:, None] * state
        state = state + torch.outer(key, beta[t] * (v[t] - state.T @ key))
        outputs.append(state.T @ query)
    return torch.stack(outputs), state


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    return rms(x, weight, eps) * (silu(z) if activation == "silu" else z.sigmoid())


def inverse_frequencies(rotary: Description, size: int) -> tuple[Tensor, float]:
    """Of every pair of channels, and the factor of cosines and sines."""
    plain = rotary["theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if rotary["type"] == "mistral_1d":
        return plain, 1.0
    context, factor = rotary["original_context_length"], rotary["scale_factor"]
    turns = context * plain / (2 * math.pi)
    if rotary["type"] == "llama3":
        low, high = rotary["low_frequency_factor"], rotary["high_frequency_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    assert rotary["type"] == "yarn"

    def pair(turns: float) -> float:
        return size / 2 * math.log(context / (2 * math.pi * turns)) / math.log(rotary["theta"])

    first = max(math.floor(pair(rotary["beta_fast"])), 0)
    last = min(math.ceil(pair(rotary["beta_slow"])), size - 1)
    kept = 1 - ((torch.arange(size // 2) - first) / max(last - first, 1e-3)).clamp(0, 1).double()
    temperature = rotary.get("attention_factor") or 0.1 * math.log(factor) + 1
    return kept * plain + (1 - kept) * plain / factor, temperature


def attention(x: Tensor, w: Tensors, mixer: Description) -> Tensor:
    size, heads = mixer["head_size"], mixer["heads"]
    positions = torch.arange(len(x))
    frequencies, temperature = inverse_frequencies(mixer["rotary"], size)
    angles = torch.outer(positions.double(), frequencies)[:, None]
    cos, sin = angles.cos() * temperature, angles.sin() * temperature

    def project(name: str) -> Tensor:
        y = x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0)
        return y.unflatten(-1, (-1, size))

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    q, k, v = rotated(project("q")), rotated(project("k")), project("v")
    seen = positions[None, :] <= positions[:, None]
    if mixer.get("window_size"):
        seen &= positions[None, :] > positions[:, None] - mixer["window_size"]
    out = []
    for h in range(heads):
        group = h // (heads // mixer["head_groups"])
        scores = (q[:, h] @ k[:, group].T * size**-0.5).masked_fill(~seen, -torch.inf)
        out.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(out, dim=-1) @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


def gdn(x: Tensor, w: Tensors, mixer: Description) -> Tensor:
    hk, hv, dk, dv = (
        mixer[n] for n in ("key_heads", "value_heads", "key_head_dim", "value_head_dim")
    )
    keys, values = hk * dk, hv * dv
    q, k, v, z = (x @ w["in_proj_qkvz.weight"].T).split([keys, keys, values, values], dim=-1)
    b, a = (x @ w["in_proj_ba.weight"].T).chunk(2, dim=-1)
    mixed = convolution(torch.cat([q, k, v], dim=-1), w["convolution.weight"])
    q, k, v = mixed.split([keys, keys, values], dim=-1)
    g = -w["A_log"].exp() * softplus(a + w["dt_bias"])
    out = []
    for h in range(hv):
        key = slice(h // (hv // hk) * dk, (h // (hv // hk) + 1) * dk)
        value = slice(h * dv, (h + 1) * dv)
        o, _ = delta_rule(q[:, key], k[:, key], v[:, value], g[:, h], b[:, h].sigmoid())
        eps = mixer.get("norm_eps", 1e-5)
        out.append(gated_norm(o, z[:, value], w["norm.weight"], eps, "silu"))
    return torch.cat(out, dim=-1) @ w["out_proj.weight"].T


def kda(x: Tensor, w: Tensors, mixer: Description) -> Tensor:
    dim, norm = mixer["head_dim"], mixer.get("normalization", {})
    q, k, v = (convolution(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv.weight"]) for n in "qkv")
    decays, gates = (x @ w[f"{n}_a_proj.weight"].T @ w[f"{n}_b_proj.weight"].T for n in ("f", "g"))
    beta = (x @ w["beta_proj.weight"].T).sigmoid()
    out = []
    for h in range(mixer["heads"]):
        part = slice(h * dim, (h + 1) * dim)
        g = -w["A_log"][h].exp() * softplus(decays[:, part] + w["dt_bias"][part])
        o, _ = delta_rule(q[:, part], k[:, part], v[:, part], g, beta[:, h])
        eps, activation = norm.get("epsilon", 1e-5), norm.get("activation", "silu")
        out.append(gated_norm(o, gates[:, part], w["norm.weight"], eps, activation))
    return torch.cat(out, dim=-1) @ w["o_proj.weight"].T


def mamba(x: Tensor, w: Tensors, mixer: Description) -> Tensor:
    inner, shared, size = mixer["d_inner"], mixer["d_xb"], mixer["state_size"]
    z, values, b, c = (x @ w["in_proj.weight"].T).split([inner, shared, shared, inner], dim=-1)
    times, heads = inner // shared, inner // size

    def repeated(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, size)).repeat_interleave(times, dim=1).flatten(1)

    first = mixer["repeat_kv_before_conv"]
    values = convolution(
        repeated(values) if first else values, w["conv1d.weight"], w.get("conv1d.bias")
    )
    values = values if first else repeated(values)
    b, c = repeated(b).unflatten(-1, (heads, size)), c.unflatten(-1, (heads, size))
    bias = w.get("dt_proj.bias", torch.zeros(inner, dtype=x.dtype))
    dt = x @ w["dt_in_proj.weight"].T @ w["dt_proj.weight"].T + bias
    step = softplus(dt + bias)  # the bias a second time: so the models were trained
    rate, state, out = -w["A_log"].exp(), x.new_zeros(inner, size), []
    for t in range(len(x)):
        columns = b[t].repeat_interleave(size, dim=0)
        state = (step[t][:, None] * rate).exp() * state + (step[t] * values[t])[:, None] * columns
        out.append((state * c[t].repeat_interleave(size, dim=0)).sum(-1) + w["D"] * values[t])
    return (torch.stack(out) * silu(z)) @ w["out_proj.weight"].T


EQUATIONS = {"attention": attention, "gdn": gdn, "kda": kda, "mamba": mamba}


class Reference:
    """The model of some tensors in fp64. `placement`: the mixer of each layer of a supernet."""

    def __init__(
        self, decoder: Description, tensors: Tensors, placement: list[str] | None = None
    ) -> None:
        self.decoder, self.placement = decoder, placement
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.eps = 1e-5

    def streams(self, token_ids: list[int]) -> list[Tensor]:
        """The residual stream `[tokens, hidden]` after 0, 1, ... layers."""
        w, x = self.weights, self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        found = [x]
        for layer in range(self.decoder["num_blocks"]):
            prefix = f"model.decoder.blocks.{layer}."
            mixers = mixers_of(self.decoder, layer)
            name = self.placement[layer] if self.placement and "" not in mixers else ""
            inner = f"{prefix}mixer.mixers.{name}." if name else f"{prefix}mixer."
            own = {k.removeprefix(inner): t for k, t in w.items() if k.startswith(inner)}
            normed = rms(x, w[f"{prefix}input_layernorm.weight"], self.eps)
            x = x + EQUATIONS[mixers[name]["type"]](normed, own, mixers[name])
            normed = rms(x, w[f"{prefix}post_attention_layernorm.weight"], self.eps)
            gate, up, down = (w[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            x = x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
            found.append(x)
        return found

    def logits(self, token_ids: list[int]) -> Tensor:
        """`[tokens, vocab]`."""
        normed = rms(self.streams(token_ids)[-1], self.weights["model.norm.weight"], self.eps)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return normed @ head.T
