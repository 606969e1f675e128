# SPDX-License-Identifier: Apache-2.0
"""Choices a model config makes by itself: dtype, length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from vllm import decisions, envs
from vllm.exceptions import VLLMValidationError
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, dtype_from_name, dtype_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfig

#: length of models whose config states none
_UNSTATED_LENGTH = 2048
_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def resolve_dtype(
    wanted: Any, model: str, config: PretrainedConfig, text_config: PretrainedConfig
) -> torch.dtype:
    """The dtype to run in. `auto` follows the checkpoint, except that float32 becomes 16 bit."""
    from vllm.platforms import current_platform

    supported = current_platform.supported_dtypes
    if wanted not in ("auto", None):
        return _explicit_dtype(wanted, supported, current_platform.device_type)
    stored = checkpoint_dtype(model, config, text_config)
    if stored is torch.float32:
        chosen = next(d for d in supported if d in (torch.bfloat16, torch.float16))
        why = "float32 checkpoints run in 16 bit; --dtype float32 keeps them"
        decisions.record("dtype", dtype_name(chosen), why, "float32")
        return chosen
    if stored in supported:
        return stored
    if stored is torch.bfloat16:
        why = f"this {current_platform.device_type} device has no bfloat16"
        decisions.record("dtype", "float16", why, "bfloat16")
        return torch.float16
    raise VLLMValidationError(
        f"the checkpoint's dtype {dtype_name(stored)} is not supported; choose --dtype from "
        + ", ".join(dtype_name(d) for d in supported),
        parameter="dtype",
        value=dtype_name(stored),
    )


def checkpoint_dtype(
    model: str, config: PretrainedConfig, text_config: PretrainedConfig
) -> torch.dtype:
    """What the config states, else what most tensors of a local checkpoint have, else float32."""
    for part in (text_config, config):
        stated = part.dtype
        if isinstance(stated, torch.dtype):
            return stated
        if isinstance(stated, str) and stated.removeprefix("torch.") in STR_DTYPE_TO_TORCH_DTYPE:
            return dtype_from_name(stated)
    return safetensors_dtype(Path(model)) or torch.float32


def safetensors_dtype(directory: Path) -> torch.dtype | None:
    """The most common float dtype in a directory's first safetensors file; None without one."""
    for path in sorted(directory.glob("*.safetensors"))[:1]:
        try:
            with safe_open(path, framework="pt") as file:
                stored = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
        except SafetensorError:
            return None
        counts = Counter(
            _SAFETENSORS_DTYPES[name] for name in stored if name in _SAFETENSORS_DTYPES
        )
        return counts.most_common(1)[0][0] if counts else None
    return None


def _explicit_dtype(wanted: Any, supported: Sequence[torch.dtype], device_type: str) -> torch.dtype:
    dtype = wanted if isinstance(wanted, torch.dtype) else STR_DTYPE_TO_TORCH_DTYPE.get(str(wanted))
    if dtype is None:
        known = ", ".join(["auto", *STR_DTYPE_TO_TORCH_DTYPE])
        raise VLLMValidationError(
            f"--dtype {wanted!r} is unknown; use one of {known}", "dtype", wanted
        )
    if dtype not in supported:
        names = ", ".join(dtype_name(d) for d in supported)
        raise VLLMValidationError(
            f"--dtype {dtype_name(dtype)} is not supported on this {device_type} device; "
            f"use one of {names}",
            parameter="dtype",
            value=dtype_name(dtype),
        )
    return dtype


def resolve_max_model_len(wanted: int | None, arch: ModelArchConfig) -> int:
    """The longest sequence; `None` and -1 (fit to memory, done later) start from the model's."""
    derived = arch.max_model_len or _UNSTATED_LENGTH
    if wanted is None or wanted == -1:
        if not arch.max_model_len:
            why = "the model config states no length; set --max-model-len"
            decisions.record("max_model_len", derived, why)
        return derived
    if wanted < 1:
        raise VLLMValidationError(
            f"--max-model-len must be positive, `auto` or -1; got {wanted}", "max_model_len", wanted
        )
    if wanted <= derived or not arch.max_model_len:
        return wanted
    if not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        raise VLLMValidationError(
            f"--max-model-len {wanted} is more than the model's limit {derived} (from "
            f"{arch.max_model_len_key}); outputs beyond it are usually wrong. Set "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 to allow it",
            parameter="max_model_len",
            value=wanted,
        )
    why = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1; outputs beyond the model's limit may be wrong"
    decisions.record("max_model_len", wanted, why, derived)
    return wanted


def shared_sliding_window(text_config: PretrainedConfig) -> int | None:
    """The window that all layers have, or None when some layer sees everything."""
    window = getattr(text_config, "sliding_window", None)
    if not isinstance(window, int) or not getattr(text_config, "use_sliding_window", True):
        return None
    kinds = set(getattr(text_config, "layer_types", None) or {"sliding_attention"})
    return window if kinds == {"sliding_attention"} else None
