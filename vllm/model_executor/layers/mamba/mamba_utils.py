# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of recurrent state, from a config alone."""

import torch

from vllm.distributed.utils import copied_parts, per_rank

#: what errors call them
KEY_HEADS = "recurrent key heads"

_STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _state_dtype(asked: str, default: torch.dtype, option: str) -> torch.dtype:
    if asked == "auto":
        return default
    if asked not in _STATE_DTYPES:
        raise ValueError(f"{option}={asked!r}; supported: auto, {', '.join(_STATE_DTYPES)}")
    return _STATE_DTYPES[asked]


class MambaStateDtypeCalculator:
    """Element types of the states, in the order of their shapes."""

    @staticmethod
    def gated_delta_net_state_dtype(
        model_dtype: torch.dtype, mamba_cache_dtype: str, mamba_ssm_cache_dtype: str
    ) -> tuple[torch.dtype, torch.dtype]:
        """(convolution, recurrent): "auto" is the model's dtype and fp32.

        fp32 because the state accumulates over the whole sequence: bf16 loses decays near 1.
        """
        return (
            _state_dtype(mamba_cache_dtype, model_dtype, "mamba_cache_dtype"),
            _state_dtype(mamba_ssm_cache_dtype, torch.float32, "mamba_ssm_cache_dtype"),
        )


class MambaStateShapeCalculator:
    """Shapes of one sequence's states in one layer of one tensor-parallel rank."""

    @staticmethod
    def gated_delta_net_state_shape(
        tp_world_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel_size: int,
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """`((K - 1, conv_dim), (value heads, head_v_dim, head_k_dim))`.

        The convolution keeps its last K - 1 inputs; the recurrent state is stored transposed.
        Raises VLLMValidationError for heads that the ranks cannot share.
        """
        k_heads = num_k_heads // copied_parts(KEY_HEADS, num_k_heads, tp_world_size)
        v_heads = per_rank("recurrent value heads", num_v_heads, tp_world_size)
        conv_dim = 2 * k_heads * head_k_dim + v_heads * head_v_dim
        return (conv_kernel_size - 1, conv_dim), (v_heads, head_v_dim, head_k_dim)
