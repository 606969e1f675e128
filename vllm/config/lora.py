# SPDX-License-Identifier: Apache-2.0
"""Adapters: not served, so a configuration for them cannot be made."""

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import config, option


@config
class LoRAConfig:
    """Importable because clients name the type; constructing one raises."""

    max_lora_rank: int = option(default=16, flag=False, help="Largest adapter rank.")
    max_loras: int = option(default=1, flag=False, help="Adapters in one batch.")

    def __post_init__(self) -> None:
        raise VLLMValidationError(
            "LoRA adapters are not supported; merge the adapter into the checkpoint",
            parameter="lora_config",
        )
