# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a model with weights on its device."""

from vllm.config import LoadConfig
from vllm.model_executor.model_loader.base import (
    BaseModelLoader,
    DummyModelLoader,
    SafetensorsModelLoader,
    initialize_model,
)

__all__ = ["BaseModelLoader", "get_model_loader", "initialize_model"]

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
