# SPDX-License-Identifier: Apache-2.0
"""What families of recurrent layers and attention have in common."""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid


class RecurrentShape(Protocol):
    """The sizes of a recurrent layer."""

    def state_shape(self, tp_size: int, /) -> tuple[tuple[int, ...], ...]:
        """Of what one sequence keeps on one tensor-parallel rank."""


class HybridForCausalLM(DecoderForCausalLM, HasInnerState, IsHybrid):
    """Says what the family's recurrent layers keep; families give `recurrent_shape`."""

    @staticmethod
    @abstractmethod
    def recurrent_shape(config: PretrainedConfig) -> RecurrentShape:
        """Of every recurrent layer."""

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        shape = cls.recurrent_shape(vllm_config.model_config.hf_text_config)
        return shape.state_shape(vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )


class MultipliedEmbeddingsModel(DecoderModel):
    """Embeddings enter the residual stream multiplied by `embedding_multiplier`."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return multiplied(super().embed_input_ids(input_ids), self.config.embedding_multiplier)


def only_silu(activation: str, prefix: str) -> None:
    """ValueError for another activation of a recurrent layer's convolution, or Mamba2's gate."""
    if activation != "silu":
        raise VLLMValidationError(
            f"{prefix}: a recurrent layer with {activation!r} is not supported; supported: silu"
        )


def multiplied(x: Tensor, multiplier: float) -> Tensor:
    """`x * multiplier`; no launch for 1."""
    return x if multiplier == 1.0 else x * multiplier
