# SPDX-License-Identifier: Apache-2.0
"""Loaders: build the model on its device, fill it from a checkpoint or by chance, freeze it."""

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer
from vllm.model_executor.model_loader.weight_utils import (
    checkpoint_dir,
    device_weights_iterator,
    part_of,
    safetensors_files,
    safetensors_weights_iterator,
)
from vllm.model_executor.models.interfaces import IsHybrid, LoadsPart, VllmModel
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.utils import AfterLoading, get_weight_attr
from vllm.utils.torch_utils import set_default_torch_dtype as set_default_torch_dtype


def initialize_model(
    vllm_config: VllmConfig, model_config: ModelConfig | None = None, prefix: str = ""
) -> nn.Module:
    """The model with uninitialised weights on the default device, in the default dtype.

    Raises ValueError for an unsupported architecture, one whose layers are never told how their
    weights are to be quantised, one that does not say that it has recurrent layers, and a config
    without a field that the model reads.
    """
    model_config = model_config or vllm_config.model_config
    model_cls, name = ModelRegistry.resolve_model_cls(model_config.architectures)
    with set_current_vllm_config(vllm_config):
        try:
            model = model_cls(vllm_config=vllm_config, prefix=prefix)
        except AttributeError as error:
            if not isinstance(error.obj, PretrainedConfig):
                raise
            raise VLLMValidationError(
                f"{error}; config.json has to give it, or the config class a default", "model"
            ) from error
    if vllm_config.quant_config is not None:
        _check_quantised(model, name, vllm_config.quant_config.name)
    if not (model_config.is_hybrid or isinstance(model, IsHybrid)):
        _check_not_hybrid(model, name)
    return model


def _check_quantised(model: nn.Module, name: str, method: str) -> None:
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    if linears and all(layer.quant_config is None for layer in linears):
        raise VLLMValidationError(
            f"weights cannot be quantised as {method}: {name} builds its linear layers without "
            "`quant_config=vllm_config.quant_config`",
            "quantization",
        )


def _check_not_hybrid(model: nn.Module, name: str) -> None:
    mixer = next((each for each in model.modules() if isinstance(each, RecurrentMixer)), None)
    if mixer is not None:
        raise VLLMValidationError(
            f"{name} has recurrent layers ({type(mixer).__name__}), so it must inherit from "
            "IsHybrid: flags for recurrent state are resolved for such models alone",
            "model",
        )


class BaseModelLoader(ABC):
    """Builds models; subclasses say where the weights come from."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every parameter of `model` in place."""

    def build_model(self, vllm_config: VllmConfig, model_config: ModelConfig) -> nn.Module:
        """The frozen model on its device, its weights uninitialised.

        Raises ValueError for an unsupported architecture.
        """
        device = torch.device(vllm_config.device_config.device)
        with torch.no_grad(), set_default_torch_dtype(model_config.dtype), device:
            model = initialize_model(vllm_config, model_config)
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


class SafetensorsModelLoader(BaseModelLoader):
    """Streams files into the parameters, without a second copy of the weights on the host: through
    pinned buffers to a GPU, as views of mapped files on a CPU."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        ignore = self.load_config.ignore_patterns
        patterns = [ignore] if isinstance(ignore, str) else ignore
        directory = checkpoint_dir(
            model_config.model, model_config.revision, self.load_config.download_dir, patterns
        )
        named = getattr(model_config.hf_config, "transformers_weights", None)
        plan = safetensors_files(directory, patterns, named)
        if isinstance(model, LoadsPart) and model.is_part:
            plan, left_out = part_of(plan, model.wants)
            model.leave_out(left_out)
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


# A prime: rows of a weight start at different places of the repeated pool, so none are equal.
_POOL_SIZE = 1_048_583
_STEP = 524_309


def dummy_range(param: Tensor) -> tuple[float, float]:
    """Uniform range of a parameter: what its layer declares, else unit gain; integers are rounded
    down.

    A matrix `[out, in]` gets `+-sqrt(3 / in)`, which keeps a signal's variance; a vector +-0.1.
    """
    bound = (3 / param.shape[-1]) ** 0.5 if param.dim() > 1 else 0.1
    low, high = get_weight_attr(param, "dummy_range", (-bound, bound))
    return low, high


def initialize_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter in place from one pool of random numbers."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    pool = torch.rand(_POOL_SIZE, generator=generator, device="cpu")
    pools: dict[torch.device, Tensor] = {}
    for index, (_, param) in enumerate(sorted(model.named_parameters())):
        if not param.is_floating_point() and get_weight_attr(param, "dummy_range", None) is None:
            raise ValueError(f"dummy weights of dtype {param.dtype} are not supported")
        if param.device not in pools:
            pools[param.device] = pool.to(param.device)
        if not param.numel():
            continue
        low, high = dummy_range(param)
        unit = _rolled(pools[param.device], index * _STEP % _POOL_SIZE, param.numel())
        _tile(param.data.view(-1), (low + (high - low) * unit).to(param.dtype))


def _rolled(pool: Tensor, shift: int, size: int) -> Tensor:
    """The first `size` of a pool that is rolled, or all of it."""
    if size > shift:
        return torch.roll(pool, shift)[:size]
    start = len(pool) - shift
    return pool[start : start + size]


def _tile(target: Tensor, pattern: Tensor) -> None:
    """Fill `target [n]` with repetitions of `pattern [p]`."""
    whole = len(target) // len(pattern) * len(pattern)
    target[:whole].view(-1, len(pattern)).copy_(pattern)
    target[whole:].copy_(pattern[: len(target) - whole])


class DummyModelLoader(BaseModelLoader):
    """`load_format="dummy"`."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        initialize_dummy_weights(model, model_config.seed or 0)
