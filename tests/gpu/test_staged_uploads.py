# SPDX-License-Identifier: Apache-2.0
"""Staged arrays reach the device with one launch per flush, in order, without waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
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


@pytest.mark.parametrize("length", [1, 3, 4, 6])
def test_bytes_travel_in_whole_words(length: int) -> None:
    uploads = Uploads.create(DEVICE, depth=2)
    assert uploads is not None
    flags = StagedArray((8,), torch.bool, DEVICE, 2, uploads)
    flags.next()[:length] = True
    got = flags.upload(length)
    uploads.flush()
    assert got.dtype == torch.bool and got.tolist() == [True] * length
    assert not flags.device[length:].any()


@pytest.mark.parametrize("padded", [None, 128])
def test_recurrent_metadata_travels_with_the_rest(padded: int | None) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(splits_scans=False),
        scheduler_config=SimpleNamespace(max_num_seqs=19, max_num_batched_tokens=8192),
    )
    common = CommonAttentionMetadata(
        num_reqs=4, num_tokens=77, num_decodes=2, max_query_len=70, max_seq_len=90,
        query_start_loc=torch.zeros(5), query_start_loc_cpu=np.array([0, 1, 2, 7, 77]),
        seq_lens=torch.zeros(4), seq_lens_cpu=np.array([9, 30, 5, 90]),
        num_computed_tokens_cpu=np.array([8, 29, 0, 20]),
        prefill_query_start_loc=torch.zeros(3), prefill_query_start_loc_cpu=np.array([0, 5, 75]),
        block_table=torch.zeros(4, 1), prefill_seq_lens=torch.zeros(2),
        prefill_block_table=torch.zeros(2, 1), slot_mapping=torch.zeros(0),
        block_table_cpu=np.array([[4], [7], [1], [9]]), padded_tokens=padded,
    )  # fmt: skip
    spec: Any = None
    apart = GDNAttentionMetadataBuilder(spec, [], config, DEVICE)
    together = GDNAttentionMetadataBuilder(spec, [], config, DEVICE)
    uploads = Uploads.create(DEVICE, depth=3)
    assert uploads is not None
    together.share_uploads(uploads)
    expected, found = apart.build(common).batch, together.build(common).batch
    names: tuple[str, ...] = ("has_initial_state", "chunk_indices", "chunk_offsets")
    if padded is not None:
        names += ("state_indices", "query_start_loc")
    assert not found.chunk_offsets.any()
    uploads.flush()
    for name in names:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.has_initial_state.any()


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
