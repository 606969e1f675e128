# SPDX-License-Identifier: Apache-2.0
"""Weights from a Hugging Face checkpoint's safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import (
    checkpoint_dir,
    device_weights_iterator,
    part_of,
    safetensors_files,
    safetensors_weights_iterator,
)
from vllm.model_executor.models.interfaces import LoadsPart, VllmModel
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.utils import get_weight_attr

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class SafetensorsModelLoader(BaseModelLoader):
    """Streams files into the parameters, without a second copy of the weights on the host: through
    pinned buffers to a GPU, as views of mapped files on a CPU."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        ignore = self.load_config.ignore_patterns
        patterns = [ignore] if isinstance(ignore, str) else ignore
        directory = checkpoint_dir(
            model_config.model, model_config.revision, self.load_config.download_dir, patterns
        )
        plan = safetensors_files(directory, patterns)
        if isinstance(model, LoadsPart) and model.is_part:
            plan = part_of(plan, model.wants)
        device, show = next(model.parameters()).device, self.load_config.use_tqdm_on_load
        weights = (
            device_weights_iterator(plan, device, show)
            if device.type == "cuda"
            else safetensors_weights_iterator(plan, show)
        )
        loaded = cast(VllmModel, model).load_weights(weights)
        needed = {
            n for n, p in model.named_parameters() if not get_weight_attr(p, "optional", False)
        }
        missing = sorted(needed - set(loaded))
        if missing:
            raise WeightsError([f"not loaded: {name}" for name in missing])
