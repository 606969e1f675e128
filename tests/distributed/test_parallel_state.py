# SPDX-License-Identifier: Apache-2.0
"""Sharding arithmetic, and the groups of one process."""

import pytest
import torch

from vllm import distributed
from vllm.distributed import parallel_state
from vllm.distributed.utils import divide, per_rank


def test_divide_is_exact() -> None:
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        divide(13, 4)


def test_what_cannot_be_shared_is_named() -> None:
    assert per_rank("heads", 12, 4) == 3
    with pytest.raises(ValueError, match="13 heads cannot be divided among 4 tensor-parallel"):
        per_rank("heads", 13, 4)


def test_a_process_alone_is_its_own_group() -> None:
    group = parallel_state.get_tp_group()
    x = torch.ones(3)
    assert (group.world_size, group.rank_in_group, group.rank) == (1, 0, 0)
    assert group.is_first_rank and group.is_last_rank
    assert group.all_reduce(x) is x and group.all_gather(x) is x
    assert distributed.tensor_model_parallel_all_reduce(x) is x
    assert distributed.get_tensor_model_parallel_world_size() == 1


def test_initialising_a_world_of_one() -> None:
    parallel_state.init_distributed_environment(world_size=1, rank=0)
    try:
        parallel_state.initialize_model_parallel(1, 1)
        assert parallel_state.model_parallel_is_initialized()
        assert not torch.distributed.is_initialized()
        with pytest.raises(ValueError, match="1 is not divisible by 2"):
            parallel_state.initialize_model_parallel(2, 1)
    finally:
        parallel_state.destroy_distributed_environment()
    assert not parallel_state.model_parallel_is_initialized()
