# SPDX-License-Identifier: Apache-2.0
"""Staged arrays reach the device with one launch per flush, in order, without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.v1.worker.staging import StagedArray, Uploads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def test_steps_in_flight_do_not_overwrite_each_other() -> None:
    uploads = Uploads.create(DEVICE, depth=3)
    assert uploads is not None
    ids = StagedArray((64,), torch.int64, DEVICE, 3, uploads)
    table = StagedArray((8, 40), torch.int32, DEVICE, 3, uploads)
    seen = []
    busy = torch.ones(2048, 2048, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    for step in range(3):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        ids.next()[: 10 + step] = np.arange(10 + step) + 100 * step
        table.next()[:4, : 3 + step] = step
        got = ids.upload(10 + step), table.upload(4, 3 + step)
        uploads.flush()
        seen.append([tensor.clone() for tensor in got])
    torch.cuda.set_sync_debug_mode("default")
    for step, (row, block) in enumerate(seen):
        assert row.tolist() == [i + 100 * step for i in range(10 + step)]
        assert block.shape == (4, 3 + step) and block.eq(step).all()
    assert ids.device[13:].eq(0).all() and table.device[4:].eq(0).all()


def test_nothing_to_copy_is_no_launch() -> None:
    uploads = Uploads.create(DEVICE, depth=2)
    assert uploads is not None
    array = StagedArray((4,), torch.int64, DEVICE, 2, uploads)
    array.next()
    assert len(array.upload(0)) == 0
    uploads.flush()
    array.next()[:] = 5
    array.upload(4)
    uploads.flush()
    uploads.flush()
    assert array.device.tolist() == [5] * 4


def test_a_part_of_several_rows_needs_uploads() -> None:
    array = StagedArray((4, 4), torch.int32, DEVICE, 2)
    array.next()
    with pytest.raises(ValueError, match="synchronously"):
        array.upload(2, 2)
