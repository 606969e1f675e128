# SPDX-License-Identifier: Apache-2.0
"""Weights from a Hugging Face checkpoint's safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import (
    checkpoint_dir,
    safetensors_files,
    safetensors_weights_iterator,
)
from vllm.model_executor.models.interfaces import VllmModel
from vllm.model_executor.models.weights import WeightsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class SafetensorsModelLoader(BaseModelLoader):
    """Streams mapped files into the parameters: no second copy of the weights on the host."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        ignore = self.load_config.ignore_patterns
        patterns = [ignore] if isinstance(ignore, str) else ignore
        directory = checkpoint_dir(
            model_config.model, model_config.revision, self.load_config.download_dir, patterns
        )
        plan = safetensors_files(directory, patterns)
        weights = safetensors_weights_iterator(plan, self.load_config.use_tqdm_on_load)
        loaded = cast(VllmModel, model).load_weights(weights)
        missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
        if missing:
            raise WeightsError([f"not loaded: {name}" for name in missing])
