# SPDX-License-Identifier: Apache-2.0
"""State comes back from page-locked memory bit by bit, and the device finds what is broken."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.kv_transfer.test_offloading_transfers import (
    PLACES,
    check_loads,
    loaded,
    make_transfers,
)
from vllm._extension import CUDA_LIBRARY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import arrival

pytestmark = pytest.mark.gpu


def test_loads_are_checked_in_device_memory() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels need compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    arena, transfers = make_transfers("cuda")
    assert isinstance(transfers._check, arrival._DeviceCheck) and arena.is_cuda
    transfers.close()
    check_loads("cuda")


def test_digests_of_the_device_have_bytes_and_seconds() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels need compute capability 9.0")
    _, transfers = make_transfers("cuda")
    stored = transfers.take_stats().data
    assert loaded(transfers, PLACES) == set()
    found = transfers.take_stats().data
    assert found["seal_bytes"] == stored["seal_bytes"] == found["load_bytes"]
    assert 0 < found["seal_seconds"] < found["load_seconds"]
    transfers.close()
