# SPDX-License-Identifier: Apache-2.0
"""Activations in plain torch: what every platform computes."""

import torch
from torch import Tensor

from vllm.kernels.norm.naive import accumulation_dtype


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate_up[:, :n]) * gate_up[:, n:]`, rounded once: `[tokens, 2n] -> [tokens, n]`."""
    gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """`max(x, 0)^2` (arXiv 2109.08668), rounded once: `[tokens, n] -> [tokens, n]`."""
    wide = x.to(accumulation_dtype(x))
    return torch.relu(wide).square().to(x.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate_up[:, :n]) * gate_up[:, n:]`, rounded once: `[tokens, 2n] -> [tokens, n]`. GELU by
    its tanh (arXiv 1606.08415, section 2)."""
    gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, offset: float) -> Tensor:
    """`g * sigmoid(alpha * g) * (u + offset)`, rounded once: `[tokens, 2n] -> [tokens, n]`, where
    `g` is the first half up to `limit` and `u` the second between `-limit` and `limit`."""
    gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + offset)).to(gate_up.dtype)


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, rounded once: `x [tokens, heads, n]`, `gate [tokens, heads, n]` with any
    token and head stride -> `[tokens, heads * n]`."""
    wide = accumulation_dtype(x)
    return (x.to(wide) * torch.sigmoid(gate.to(wide))).to(x.dtype).flatten(1)
