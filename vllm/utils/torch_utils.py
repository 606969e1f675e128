# SPDX-License-Identifier: Apache-2.0
"""Torch dtypes by name, and copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

STR_DTYPE_TO_TORCH_DTYPE: dict[str, torch.dtype] = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


_FP8_NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def dtype_from_name(name: str | torch.dtype) -> torch.dtype:
    """`"bfloat16"`, `"torch.bfloat16"` or a dtype; `ValueError` with the known names otherwise."""
    if isinstance(name, torch.dtype):
        return name
    dtype = STR_DTYPE_TO_TORCH_DTYPE.get(name.removeprefix("torch."))
    if dtype is None:
        known = ", ".join(STR_DTYPE_TO_TORCH_DTYPE)
        raise ValueError(f"unknown dtype {name!r}; known: {known}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def get_kv_cache_torch_dtype(
    cache_dtype: str | torch.dtype, model_dtype: str | torch.dtype | None = None
) -> torch.dtype:
    """The dtype of KV caches; `"auto"` is the model's, `"fp8"` is e4m3."""
    if isinstance(cache_dtype, str) and cache_dtype in _FP8_NAMES:
        return _FP8_NAMES[cache_dtype]
    if cache_dtype == "auto":
        if model_dtype is None:
            raise ValueError("cache dtype 'auto' needs the model's dtype")
        return dtype_from_name(model_dtype)
    return dtype_from_name(cache_dtype)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`, without waiting for the copy; itself on a CPU."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default floating dtype for the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: torch.library.Library | None = None,
    dispatch_key: str | None = None,
) -> None:
    """Register `op_func` as `torch.ops.vllm.<op_name>`; its schema comes from its annotations."""
    from torch.library import infer_schema

    from vllm.platforms import current_platform

    library = target_lib or _vllm_library()
    library.define(op_name + infer_schema(op_func, mutates_args=mutates_args or []))
    library.impl(op_name, op_func, dispatch_key=dispatch_key or current_platform.dispatch_key)
    if fake_impl is not None:
        library._register_fake(op_name, fake_impl)


_library: torch.library.Library | None = None


def _vllm_library() -> torch.library.Library:
    global _library
    if _library is None:
        _library = torch.library.Library("vllm", "FRAGMENT")
    return _library
