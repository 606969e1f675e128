# SPDX-License-Identifier: Apache-2.0
"""The device the model runs on."""

from typing import Literal

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import config, option


@config
class DeviceConfig:
    """Where the model runs."""

    device: Literal["auto", "cpu", "cuda"] = option(
        default="auto",
        help="Device kind; `auto` is CUDA when a GPU is visible, else the CPU. Set the environment "
        "variable VLLM_TARGET_DEVICE=cpu to force the CPU.",
    )

    def __post_init__(self) -> None:
        from vllm.platforms import current_platform

        if self.device not in ("auto", current_platform.device_type):
            raise VLLMValidationError(
                f"--device {self.device}: this process runs on {current_platform.device_type}; "
                f"start it with VLLM_TARGET_DEVICE={self.device}",
                parameter="device",
                value=self.device,
            )
        self.device = current_platform.device_type

    @property
    def device_type(self) -> str:
        return self.device
