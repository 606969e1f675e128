# SPDX-License-Identifier: Apache-2.0
"""How experts follow the traffic."""

from pydantic import NonNegativeInt, PositiveInt

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import json_config, option


@json_config
class EPLBConfig:
    """Settings of `--enable-eplb`, expert-parallel load balancing."""

    window_size: PositiveInt = option(
        default=1000, help="Steps before a rearrangement whose tokens decide it."
    )
    step_interval: PositiveInt = option(default=3000, help="Steps between rearrangements.")
    num_redundant_experts: NonNegativeInt = option(
        default=0, help="Copies of experts in each layer, over all ranks."
    )
    log_balancedness: bool = option(
        default=False, help="Log the balancedness before and after each rearrangement."
    )

    def __post_init__(self) -> None:
        if self.window_size > self.step_interval:
            raise VLLMValidationError(
                f"--eplb-config: window_size {self.window_size} is more than step_interval "
                f"{self.step_interval}; a window is of steps since the rearrangement before",
                "window_size",
                self.window_size,
            )
