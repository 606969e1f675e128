# SPDX-License-Identifier: Apache-2.0
"""Several arrays of one table reach their targets, and nothing else is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.kernels.triton.upload import COLUMNS, PROGRAMS_PER_ARRAY, WORDS, upload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PINNED = DEVICE == "cuda"


def _host(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    values = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(dtype)
    return values.pin_memory() if PINNED else values


def _row(host: Tensor, device: Tensor) -> list[int]:
    words = host.element_size() // 4
    rows, pitch = (1, 0) if host.dim() == 1 else (host.shape[0], host.stride(0) * words)
    return [host.data_ptr(), device.data_ptr(), host.shape[-1] * words, rows, pitch]


def _table(rows: list[list[int]]) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64)
    assert table.shape[1] == COLUMNS
    return table.pin_memory() if PINNED else table


LONG = PROGRAMS_PER_ARRAY * WORDS


@pytest.mark.parametrize("length", [1, 7, WORDS, WORDS + 1, LONG - 1, 2 * LONG + 5])
def test_lengths(length: int) -> None:
    host, other = _host(length), _host(3, dtype=torch.int64)
    device = torch.full((length + 8,), -7, dtype=torch.int32, device=DEVICE)
    target = torch.full((5,), -7, dtype=torch.int64, device=DEVICE)
    upload(_table([_row(host, device[4:-4]), _row(other, target[1:4])]), 2)
    assert torch.equal(device[4:-4].cpu(), host) and torch.equal(target[1:4].cpu(), other)
    assert device[:4].eq(-7).all() and device[-4:].eq(-7).all()
    assert target[0] == target[4] == -7


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 5), (40, 33), (2, 64)])
def test_the_leading_columns_of_several_rows(rows: int, width: int) -> None:
    host = _host(rows, 64)
    device = torch.full((rows + 1, 64), -7, dtype=torch.int32, device=DEVICE)
    upload(_table([_row(host[:, :width], device[:rows, :width])]), 1)
    assert torch.equal(device[:rows, :width].cpu(), host[:, :width])
    assert device[:, width:].eq(-7).all() and device[rows].eq(-7).all()


def test_only_the_counted_rows_of_the_table_are_read() -> None:
    host, device = _host(4), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    upload(_table([_row(host, device), [0, 0, 5, 1, 0]]), 1)
    assert torch.equal(device.cpu(), host)
