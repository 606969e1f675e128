# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a model with weights on its device."""

from torch import nn

from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base import (
    BaseModelLoader,
    DummyModelLoader,
    SafetensorsModelLoader,
    initialize_model,
)

__all__ = ["BaseModelLoader", "get_model", "get_model_loader", "initialize_model"]

_LOADERS: dict[str, type[BaseModelLoader]] = {
    "auto": SafetensorsModelLoader,
    "hf": SafetensorsModelLoader,
    "safetensors": SafetensorsModelLoader,
    "dummy": DummyModelLoader,
}


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    """The loader of a load format; raises ValueError for an unknown format."""
    loader = _LOADERS.get(load_config.load_format)
    if loader is None:
        raise ValueError(
            f"load_format {load_config.load_format!r} is not supported; "
            f"supported: {sorted(_LOADERS)}"
        )
    return loader(load_config)


def get_model(
    vllm_config: VllmConfig, model_config: ModelConfig | None = None, prefix: str = ""
) -> nn.Module:
    """The model on its device, weights loaded, in evaluation mode, without gradients.

    Raises ValueError for an unknown architecture or a checkpoint that does not fit.
    """
    loader = get_model_loader(vllm_config.load_config)
    return loader.load_model(
        vllm_config=vllm_config,
        model_config=model_config or vllm_config.model_config,
        prefix=prefix,
    )
