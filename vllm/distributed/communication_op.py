# SPDX-License-Identifier: Apache-2.0
"""Collectives of the tensor-parallel group; free when the group is one process."""

from torch import Tensor

from vllm.distributed.parallel_state import get_tp_group


def tensor_model_parallel_all_reduce(x: Tensor, in_place: bool = False) -> Tensor:
    """The sum of `x` over the tensor-parallel group; `in_place`: `x` is not needed any more, and
    may hold it."""
    return get_tp_group().all_reduce(x, in_place)


def tensor_model_parallel_all_gather(x: Tensor, dim: int = -1) -> Tensor:
    """The shards of `x` concatenated along `dim` in rank order."""
    return get_tp_group().all_gather(x, dim)
