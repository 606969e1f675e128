# SPDX-License-Identifier: Apache-2.0
"""Weights in host memory: those of modules that no step runs now, but a later one may.

A parameter stays the same object while its values are copied; loading fills it wherever it is.
Nothing else of a module moves: buffers are small or shared (rotary tables). Addresses change, so
graphs of steps that run such a module end before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vllm.model_executor.utils import get_weight_attr
from vllm.platforms import current_platform

_ON_HOST = "on_host"


def is_on_host(param: Tensor) -> bool:
    """Whether a parameter is one of those that no step runs."""
    return bool(get_weight_attr(param, _ON_HOST, False))


def send_to_host(module: nn.Module) -> None:
    """Give the device memory of a module's parameters back. `MemoryError` where the host has no
    room; what has moved by then stays there."""
    for param in module.parameters():
        if not is_on_host(param):
            try:
                param.data = current_platform.to_host(param.data)
            except RuntimeError as error:
                raise MemoryError(
                    f"the host has no room for {param.nbytes} bytes of weights that no placement "
                    f"in use needs: {error}"
                ) from None
            param.__dict__[_ON_HOST] = True


def fetch_from_host(module: nn.Module, device: torch.device) -> None:
    """Let steps run a module again. Raises torch's error where the device has no room; what has
    moved by then stays there."""
    for param in module.parameters():
        if is_on_host(param):
            param.data = current_platform.to_device(param.data, device)
            param.__dict__[_ON_HOST] = False


def parameter_bytes(modules: Iterable[nn.Module]) -> int:
    """Wherever they are."""
    return sum(param.nbytes for module in modules for param in module.parameters())


def bytes_on_host(modules: Iterable[nn.Module]) -> int:
    """Of these modules' parameters."""
    found = (param for module in modules for param in module.parameters() if is_on_host(param))
    return sum(param.nbytes for param in found)
