# SPDX-License-Identifier: Apache-2.0
"""Quantisation methods by name, and which one a model uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8_config import (
    fp8_at_load,
    fp8_from_checkpoint,
    fp8_from_compressed_tensors,
    fp8_from_modelopt,
)
from vllm.model_executor.layers.quantization.mxfp4 import METHOD as MXFP4
from vllm.model_executor.models.interfaces import Dequantises
from vllm.model_executor.models.registry import ModelRegistry

#: `quant_method` of a checkpoint -> its reader
_STORED: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "fp8": fp8_from_checkpoint,
    "compressed-tensors": fp8_from_compressed_tensors,
    "modelopt": fp8_from_modelopt,
}
#: `quant_method` of checkpoints that a model's own loader makes 16-bit: see `Dequantises`
_MADE_16_BIT = (MXFP4,)
#: methods that quantise 16-bit checkpoints while they load
_AT_LOAD: dict[str, Callable[[], QuantizationConfig]] = {"fp8": fp8_at_load}


def stored_quantization(model: ModelConfig) -> Mapping[str, Any] | None:
    """The checkpoint's `quantization_config`, or None."""
    for config in (model.hf_config, model.hf_text_config):
        found = getattr(config, "quantization_config", None)
        if found:
            stored = found if isinstance(found, Mapping) else dict(found.to_dict())
            # DeepSeek-V4 has this beside it, and transformers before 5.23 leaves it there.
            experts = getattr(config, "expert_dtype", None)
            return stored if experts is None else {"expert_dtype": experts, **stored}
    return None


def make_quantization_config(model: ModelConfig) -> QuantizationConfig | None:
    """What `--quantization` and the checkpoint ask for together; None for 16-bit weights.

    Raises VLLMValidationError naming what is supported.
    """
    from vllm.platforms import current_platform

    asked, stored = model.quantization, stored_quantization(model)
    method = None if stored is None else _method(stored)
    if asked is None and method is None:
        return None
    if asked is not None and method is not None and asked != method:
        raise _refused(asked, f"the checkpoint is quantised as {method}; leave the flag out")
    if method in _MADE_16_BIT:
        _check_dequantised(method, model.architectures)
        return None
    try:
        config = _STORED[method](stored) if stored and method else _AT_LOAD[asked or ""]()
    except KeyError:
        stored_methods = ", ".join([*_STORED, *_MADE_16_BIT])
        supported = f"checkpoints: {stored_methods}; at load: {', '.join(_AT_LOAD)}"
        raise _refused(asked or method, f"not supported; supported: {supported}") from None
    except ValueError as error:
        raise _refused(asked or method, str(error)) from None
    if not current_platform.supports_fp8:
        why = "float8 needs compute capability 8.9 or higher; serve a 16-bit checkpoint"
        raise _refused(asked or method, why)
    return config


def _method(stored: Mapping[str, Any]) -> str:
    method = stored.get("quant_method")
    if method is None:
        raise VLLMValidationError(
            f"the checkpoint's quantization_config {dict(stored)} names no quant_method", "model"
        )
    return str(method)


def _check_dequantised(method: str, architectures: Sequence[str]) -> None:
    """VLLMValidationError for a model whose loader does not make such weights 16-bit."""
    model_class, name = ModelRegistry.resolve_model_cls(architectures)
    if _dequantises(model_class, method):
        return
    known = sorted(ModelRegistry.get_supported_archs())
    families = [one for one in known if _dequantises(ModelRegistry.load_model_cls(one), method)]
    raise _refused(
        method,
        f"not supported for {name}; supported for {', '.join(families)}; serve a checkpoint in 16 "
        "bits or float8",
    )


def _dequantises(model_class: type[nn.Module], method: str) -> bool:
    return issubclass(model_class, Dequantises) and method in model_class.dequantised_methods


def _refused(method: str | None, why: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"--quantization {method}: {why}", parameter="quantization", value=str(method)
    )
