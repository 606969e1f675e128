# SPDX-License-Identifier: Apache-2.0
"""Our files against the safetensors library, and copies of rows against plain indexing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.distributed.kv_transfer.extraction_harness import strided_cache
from vllm import decisions
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    choose_reservation,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import tensor_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    RowCopier,
    extract_from_kv_cache,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_library_reads_it(tmp_path: Path, dtype: torch.dtype, num_rows: int) -> None:
    tensors = {
        "hidden_states": torch.randn(num_rows, 3, 5).to(dtype),
        "token_ids": torch.arange(num_rows),
    }
    path = str(tmp_path / "x.safetensors")
    tensor_file.write(path, tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    with safe_open(path, framework="pt") as f:
        assert f.metadata() is None


def test_shorter_than_what_was_there(tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    tensor_file.write(path, {"a": torch.arange(1000)})
    tensor_file.write(path, {"a": torch.arange(3)})
    assert load_file(path)["a"].tolist() == [0, 1, 2]


def test_inference_tensors(tmp_path: Path) -> None:
    with torch.inference_mode():
        rows = torch.ones(4, 2)
    path = str(tmp_path / "x.safetensors")
    tensor_file.write(path, {"a": rows})
    assert torch.equal(load_file(path)["a"], torch.ones(4, 2))


@settings(max_examples=60, deadline=None)
@given(
    block_size=st.integers(1, 9),
    num_tokens=st.integers(0, 40),
    padding=st.integers(0, 7),
    data=st.data(),
)
def test_copy_of_any_blocks(
    block_size: int, num_tokens: int, padding: int, data: st.DataObject
) -> None:
    num_blocks = -(-num_tokens // block_size)
    cache = strided_cache(50, block_size, 2, 3, padding=padding)
    cache[:] = torch.randn(cache.shape)
    ids = data.draw(st.permutations(range(1, 50)))[: num_blocks + 1]
    rows, event = RowCopier(cache).copy(ids, num_tokens)
    event.synchronize()
    slots = torch.tensor(
        [ids[t // block_size] * block_size + t % block_size for t in range(num_tokens)],
        dtype=torch.int64,
    )
    assert event.query() and rows.hidden_states.is_contiguous() and rows.scales is None
    assert torch.equal(rows.hidden_states, extract_from_kv_cache(cache, slots, num_tokens))


def test_too_few_blocks() -> None:
    with pytest.raises(ValueError, match="17 rows need 2 blocks of 16, got 1"):
        RowCopier(strided_cache(4, 16, 2, 3)).copy([1], 17)


@pytest.mark.gpu
def test_copy_from_the_device_is_ordered_after_pending_work() -> None:
    """The copy sees rows written just before it, and survives rows written just after it."""
    block_size, num_blocks = 16, 4000
    cache = torch.zeros(num_blocks, block_size, 4, 256, dtype=torch.bfloat16, device="cuda")
    copier = RowCopier(cache)
    ids = torch.randperm(num_blocks)[:1001].tolist()
    num_tokens = 1000 * block_size + 3
    expected = torch.randn(cache.shape, dtype=torch.bfloat16)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 1e-2
    cache.copy_(expected.cuda())
    rows, event = copier.copy(ids, num_tokens)
    assert rows.hidden_states.is_pinned()
    event.synchronize()
    cache.zero_()
    assert event.query()
    assert torch.equal(rows.hidden_states, expected[ids].flatten(0, 1)[:num_tokens])


def test_reservation_is_a_recorded_decision(tmp_path: Path) -> None:
    assert choose_reservation(str(tmp_path / "new")) is True
    assert (tmp_path / "new").is_dir()
    [record] = [d for d in decisions.decisions() if d.what == "hidden-state file space"]
    assert "4 MiB" in record.why


def test_slow_reservation_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{choose_reservation.__module__}._probe", lambda directory: 0.5)
    assert choose_reservation(str(tmp_path)) is False
    [record] = [d for d in decisions.decisions() if d.what == "hidden-state file space"]
    assert record.instead_of == "reserved at a request's start"
