# SPDX-License-Identifier: Apache-2.0
"""The device this process runs on, chosen on first use.

`from vllm.platforms import current_platform`. Neither importing nor choosing initialises CUDA.
"""

from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    current_platform: Platform

__all__ = ["DeviceCapability", "Platform", "PlatformEnum", "current_platform"]

_current: Platform | None = None


def _choose() -> Platform:
    from vllm import decisions
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.cuda import CudaPlatform, count_devices

    wanted = envs.VLLM_TARGET_DEVICE
    if wanted == "cpu":
        return CpuPlatform()
    found = count_devices()
    if wanted == "cuda":
        if found == 0:
            raise VLLMValidationError(
                "VLLM_TARGET_DEVICE=cuda, but torch finds no CUDA device; set it to cpu"
            )
        return CudaPlatform()
    if found:
        decisions.PROCESS.record("platform", "cuda", f"{found} CUDA device(s) visible", "cpu")
        return CudaPlatform()
    decisions.PROCESS.record("platform", "cpu", "torch finds no CUDA device", "cuda")
    return CpuPlatform()


def __getattr__(name: str) -> Any:
    global _current
    if name != "current_platform":
        raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
    if _current is None:
        _current = _choose()
    return _current
