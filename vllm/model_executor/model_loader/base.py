# SPDX-License-Identifier: Apache-2.0
"""The steps every loader shares: build the model on its device, fill it, freeze it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.utils import AfterLoading, get_weight_attr

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of new floating-point tensors inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def initialize_model(
    vllm_config: VllmConfig, model_config: ModelConfig | None = None, prefix: str = ""
) -> nn.Module:
    """The model with uninitialised weights on the default device, in the default dtype.

    Raises ValueError for an unsupported architecture.
    """
    model_config = model_config or vllm_config.model_config
    model_cls, _ = ModelRegistry.resolve_model_cls(model_config.architectures)
    with set_current_vllm_config(vllm_config):
        return model_cls(vllm_config=vllm_config, prefix=prefix)


class BaseModelLoader(ABC):
    """Builds models; subclasses say where the weights come from."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every parameter of `model` in place."""

    def build_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """The frozen model on its device, its weights uninitialised.

        Raises ValueError for an unsupported architecture.
        """
        device = torch.device(vllm_config.device_config.device)
        with torch.no_grad(), set_default_torch_dtype(model_config.dtype), device:
            model = initialize_model(vllm_config, model_config, prefix)
        return model.eval().requires_grad_(False)

    def fill(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights and derive what depends on them; may be repeated."""
        for param in model.parameters():
            default = get_weight_attr(param, "default", None)
            if default is not None:
                param.data.fill_(default)
        self.load_weights(model, model_config)
        for module in model.modules():
            if isinstance(module, AfterLoading):
                module.process_weights_after_loading()

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """See `get_model`."""
        model = self.build_model(vllm_config, model_config, prefix)
        with torch.no_grad():
            self.fill(model, model_config)
        return model
