# SPDX-License-Identifier: Apache-2.0
"""Activations of feed-forward networks."""

from torch import Tensor, nn

from vllm.platforms import current_platform


class SiluAndMul(nn.Module):
    """SwiGLU's gate (arXiv 2002.05202): `silu(x[:, :n]) * x[:, n:]`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, 2n] -> [tokens, n]`."""
        return current_platform.kernels.silu_and_mul(x)


class SquaredReLU(nn.Module):
    """`max(x, 0)^2` (Primer, arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, n] -> [tokens, n]`."""
        return current_platform.kernels.relu_squared(x)


def get_act_fn(name: str) -> nn.Module:
    """The activation of a network without gate; raises ValueError for an unknown one."""
    if name != "relu2":
        raise ValueError(f"hidden_act {name!r} is not supported without gate; supported: 'relu2'")
    return SquaredReLU()


def get_act_and_mul_fn(name: str) -> nn.Module:
    """The gated activation of a config's `hidden_act`; raises ValueError for an unknown one."""
    if name != "silu":
        raise ValueError(f"hidden_act {name!r} is not supported; supported: 'silu'")
    return SiluAndMul()
