# SPDX-License-Identifier: Apache-2.0
"""Block tables and slots per group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.block_tables import GroupBlockTable

CPU = torch.device("cpu")
PAGED = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
STATE = MambaSpec(512, ((4,),), (torch.float32,))


def _paged() -> GroupBlockTable:
    return GroupBlockTable(PAGED, 32, 4, 32, device=CPU, depth=2)


def test_a_table_is_as_wide_as_the_longest_request() -> None:
    """What pads a decode reads past its blocks, at the null block and not at what was there."""
    table = _paged()
    table.set_row(1, [5, 9, 7])
    table.set_row(1, [5])
    table.append_row(1, [2])
    device, _, _ = table.gather(np.array([1]), 1, 1, longest=9)
    assert device.tolist() == [[5, 2, 0]]
    assert table.gather(np.array([1]), 1, 1, longest=99)[0].shape == (1, 8)
    assert table.paged.block_table.data_ptr() == device.data_ptr()
    assert (table.paged.block_size, len(table.paged.slots)) == (4, 32)


def test_a_replaced_row_forgets_its_old_blocks() -> None:
    table = _paged()
    table.set_row(0, [5, 6, 7])
    table.set_row(0, [1])
    device, host, prefills = table.gather(np.array([0]), 1, 1)
    assert prefills.shape == (0, 1)
    assert device.tolist() == [[1]] and host.tolist() == [[1]]


def test_gather_pads_rows_and_uses_the_widest() -> None:
    table = _paged()
    table.set_row(0, [1])
    table.set_row(3, [2, 3, 4])
    device, host, _ = table.gather(np.array([3, 0]), 3, 2)
    assert device.shape == (3, 3)
    assert device[0].tolist() == [2, 3, 4]
    assert device[1, 0] == 1
    assert device[2].tolist() == [-1, -1, -1]
    assert host.shape == (2, 3)


def test_prefills_lie_at_an_address_of_their_own() -> None:
    """Whatever the number of decodes: kernels are compiled for the alignment of what they get."""
    addresses = set()
    for decodes in range(4):
        table = GroupBlockTable(PAGED, 32, 4, 32, device=CPU, depth=1)
        for row in range(4):
            table.set_row(row, [10 + row, 20 + row])
        device, _, prefills = table.gather(np.array([0, 1, 2, 3]), 4, decodes)
        assert torch.equal(prefills, device[decodes:]) and len(device) == 4
        addresses.add(prefills.data_ptr() % 64)
    assert addresses == {0}


def test_decodes_of_a_recurrent_group_are_padded() -> None:
    table = GroupBlockTable(STATE, 32, 4, 32, device=CPU, depth=2)
    table.set_row(1, [7])
    table.set_row(2, [5])
    assert table.decode_blocks(np.array([2, 1]), 4).tolist() == [5, 7, -1, -1]
    assert table.decode_blocks(np.array([2, 1]), 2).tolist() == [5, 7]
    assert len(_paged().decode_blocks(np.array([0]), 4)) == 0


def test_recurrent_groups_have_one_block() -> None:
    table = GroupBlockTable(STATE, 32, 4, 32, device=CPU, depth=2)
    table.set_row(2, [7])
    assert table.gather(np.array([2]), 1, 1)[0].tolist() == [[7]]


def test_a_recurrent_group_has_room_for_the_states_of_drafts() -> None:
    spec = replace(STATE, num_speculative_blocks=2)
    table = GroupBlockTable(spec, 32, 4, 32, device=CPU, depth=2)
    table.set_row(2, [7, 8, 9])
    assert table.gather(np.array([2]), 1, 1)[0].tolist() == [[7, 8, 9]]
