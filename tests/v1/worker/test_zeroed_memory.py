# SPDX-License-Identifier: Apache-2.0
"""New memory is zero whatever was there, and takes no room before it is used."""

from __future__ import annotations

import psutil
import pytest
import torch

from vllm.v1.worker import zeroed_memory
from vllm.v1.worker.zeroed_memory import new_zeros, zero

CPU = torch.device("cpu")


@pytest.mark.parametrize("begin", [0, 1, 4095, 4096])
@pytest.mark.parametrize("size", [0, 1, 5000, 1 << 20, (3 << 20) + 77])
def test_all_of_it_and_nothing_else(begin: int, size: int) -> None:
    around = torch.full((begin + size + 5000,), 7, dtype=torch.uint8)
    zero(around[begin : begin + size])
    assert not around[begin : begin + size].any()
    assert bool((around[:begin] == 7).all()) and bool((around[begin + size :] == 7).all())


def test_where_the_system_keeps_its_pages_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(zeroed_memory, "_give_back", lambda *pages: asked.append(pages))
    memory = torch.full((2 << 20,), 7, dtype=torch.uint8)
    zero(memory)
    assert asked and not memory.any()


@pytest.mark.skipif("sys.platform != 'linux'", reason="only Linux hands out zeroed pages")
def test_memory_that_is_not_used_takes_no_room() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    memory = new_zeros(256 << 20, CPU)
    assert process.memory_info().rss - before < 16 << 20
    memory[: 64 << 20].fill_(1)
    assert process.memory_info().rss - before > 48 << 20
    assert not memory[64 << 20 :: 4096].any()
