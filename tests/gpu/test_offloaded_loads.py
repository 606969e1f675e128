# SPDX-License-Identifier: Apache-2.0
"""State comes back from page-locked memory bit by bit, and the device finds what is broken."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.kv_transfer.test_offloading_transfers import check_loads, make_transfers
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
