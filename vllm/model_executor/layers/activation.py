# SPDX-License-Identifier: Apache-2.0
"""Activations of feed-forward networks."""

from dataclasses import astuple

from torch import Tensor, nn

from vllm.exceptions import VLLMValidationError
from vllm.kernels.moe import ClampedSwiglu
from vllm.platforms import current_platform


class SiluAndMul(nn.Module):
    """SwiGLU's gate (arXiv 2002.05202): `silu(x[:, :n]) * x[:, n:]`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, 2n] -> [tokens, n]`."""
        return current_platform.kernels.silu_and_mul(x)


class ClampedSiluAndMul(nn.Module):
    """A gate whose inputs are bounded: see `Kernels.clamped_swiglu`."""

    def __init__(self, clamp: ClampedSwiglu) -> None:
        super().__init__()
        self.clamp = clamp

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, 2n] -> [tokens, n]`."""
        return current_platform.kernels.clamped_swiglu(x, *astuple(self.clamp))

    def extra_repr(self) -> str:
        return f"{self.clamp}"


class SquaredReLU(nn.Module):
    """`max(x, 0)^2` (Primer, arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, n] -> [tokens, n]`."""
        return current_platform.kernels.relu_squared(x)


def get_act_fn(name: str) -> nn.Module:
    """The activation of a network without gate; raises ValueError for an unknown one."""
    if name != "relu2":
        raise VLLMValidationError(
            f"hidden_act {name!r} is not supported without gate; supported: 'relu2'"
        )
    return SquaredReLU()


class GeluTanhAndMul(nn.Module):
    """GeGLU's gate with the tanh form of GELU: `gelu(x[:, :n]) * x[:, n:]`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, 2n] -> [tokens, n]`."""
        return current_platform.kernels.gelu_tanh_and_mul(x)


_GATES: dict[str, type[nn.Module]] = {
    "silu": SiluAndMul,
    "gelu_pytorch_tanh": GeluTanhAndMul,
}


def get_act_and_mul_fn(name: str) -> nn.Module:
    """The gated activation of a config's `hidden_act`; raises ValueError for an unknown one."""
    if name not in _GATES:
        supported = ", ".join(map(repr, _GATES))
        raise VLLMValidationError(f"hidden_act {name!r} is not supported; supported: {supported}")
    return _GATES[name]()
