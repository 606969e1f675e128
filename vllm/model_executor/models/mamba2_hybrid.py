# SPDX-License-Identifier: Apache-2.0
"""What families of Mamba2 and attention have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mamba2 import Mamba2Shape


class Mamba2HybridForCausalLM(DecoderForCausalLM, HasInnerState, IsHybrid):
    """Says what the family's Mamba2 layers keep; families give `mamba2_shape`."""

    @staticmethod
    @abstractmethod
    def mamba2_shape(config: PretrainedConfig) -> Mamba2Shape:
        """The recurrent mixer."""

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        shape = cls.mamba2_shape(vllm_config.model_config.hf_text_config)
        return shape.state_shape(vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )


def only_silu(activation: str, prefix: str) -> None:
    """ValueError for another activation of the convolution and the gate."""
    if activation != "silu":
        raise ValueError(f"{prefix}: Mamba2 with {activation!r} is not supported; supported: silu")


def multiplied(x: Tensor, multiplier: float) -> Tensor:
    """`x * multiplier`; no launch for 1."""
    return x if multiplier == 1.0 else x * multiplier
