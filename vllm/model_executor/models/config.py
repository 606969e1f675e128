# SPDX-License-Identifier: Apache-2.0
"""What a model family settles in the configuration before the engine starts."""

from vllm.config import VllmConfig


class VerifyAndUpdateConfig:
    """Base of a family's rules; the hook may change the config or raise ValueError."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Called once with the complete configuration."""


class MambaModelConfig(VerifyAndUpdateConfig):
    """Models with recurrent layers. State keeps its own block geometry, so nothing is aligned."""


class HybridAttentionMambaModelConfig(MambaModelConfig):
    """Recurrent layers beside attention; attention keeps its own block size."""


#: architecture -> its rules; plugins add theirs
MODELS_CONFIG_MAP: dict[str, type[VerifyAndUpdateConfig]] = {}
