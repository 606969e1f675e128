# SPDX-License-Identifier: Apache-2.0
"""Specs: bytes, blocks per request, merging."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from state_cases import full, hidden, recurrent, vllm_config, window

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)


def mla(**changes):
    fields = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, **changes}
    return MLAAttentionSpec(**{"block_size": 16, **fields})


def test_attention_bytes():
    assert full().page_size_bytes == 2 * 16 * 4 * 256 * 2
    assert full(head_size_v=128).page_size_bytes == 16 * 4 * (256 + 128) * 2
    assert window(8, head_size_v=128).page_size_bytes == 16 * 4 * (256 + 128) * 2
    assert mla().page_size_bytes == 16 * 576 * 2
    assert hidden().page_size_bytes == 16 * 3 * 2560 * 2


def test_mla_compression_and_alignment():
    spec = mla(compress_ratio=4, alignment=1000)
    assert spec.storage_block_size == 4
    assert spec.page_size_bytes == 5000  # 4 * 576 * 2 = 4608
    with pytest.raises(ValueError, match="compress_ratio"):
        mla(compress_ratio=3)


def test_padding_is_used_and_checked():
    assert full(page_size_padded=70000).page_size_bytes == 70000
    assert full(page_size_padded=70000).real_page_size_bytes == 65536
    with pytest.raises(ValueError, match="below the real size"):
        _ = full(page_size_padded=65535).page_size_bytes
    with pytest.raises(ValueError, match="below the real size"):
        _ = recurrent(page_size_padded=1).page_size_bytes


def test_recurrent_state_layout():
    assert recurrent().state_bytes == (49152, 2097152)
    assert recurrent().state_offsets == (0, 49152)
    assert recurrent().page_size_bytes == 2146304
    odd = MambaSpec(16, ((3, 5), (4,), (1,)), (torch.float16, torch.float32, torch.float32))
    assert odd.state_offsets == (0, 32, 48)  # 30 bytes, then 16, then 4
    assert odd.page_size_bytes == 52
    assert MambaSpec(16, (), ()).page_size_bytes == 0
    with pytest.raises(ValueError, match="shapes"):
        MambaSpec(16, ((1,),), ())
    with pytest.raises(ValueError, match="mamba_cache_mode"):
        recurrent(mamba_cache_mode="some")


def test_memory_per_request():
    config = vllm_config(max_model_len=1000, max_num_batched_tokens=100)
    pages = {
        full(): 63,
        mla(): 63,
        hidden(): 63,
        window(50): 11,  # ceil((49 + 100) / 16) + 1
        window(5000): 64,
        recurrent(): 1,
        recurrent(num_speculative_blocks=2): 3,
        recurrent(mamba_cache_mode="align"): 2,
        recurrent(mamba_cache_mode="all", num_speculative_blocks=1): 64,
        ChunkedLocalAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.float16,
            attention_chunk_size=128,
        ): 15,  # ceil((128 + 100) / 16)
    }
    for spec, count in pages.items():
        assert spec.max_memory_usage_bytes(config) == count * spec.page_size_bytes, spec


def test_frozen_hashable_and_replaceable():
    spec = hidden()
    with pytest.raises(FrozenInstanceError):
        spec.block_size = 3
    assert {spec: 1}[hidden()] == 1
    smaller = spec.copy_with_new_block_size(4)
    assert type(smaller) is HiddenStateCacheSpec
    assert type(replace(spec, head_size=8)) is HiddenStateCacheSpec
    assert smaller.block_size == 4
    assert smaller.page_size_bytes * 4 == spec.page_size_bytes


def test_hidden_states_merge_only_with_their_like():
    as_mla = MLAAttentionSpec(block_size=16, num_kv_heads=3, head_size=2560, dtype=torch.bfloat16)
    assert as_mla != hidden()
    assert HiddenStateCacheSpec.merge([hidden(), hidden()]) == hidden()
    for specs in ([hidden(), as_mla], [as_mla, hidden()], [hidden(), hidden(head_size=64)]):
        with pytest.raises(ValueError, match="equal specs"):
            type(specs[0]).merge(specs)
    with pytest.raises(ValueError):
        type(full()).merge([full(), hidden()])
    assert not full().is_uniform_with_collection({"a": full(), "b": hidden()})


def test_mla_merge_compares_every_field():
    with pytest.raises(ValueError, match="equal specs"):
        MLAAttentionSpec.merge([mla(), mla(head_size=64)])


def test_full_attention_merges_windows():
    merged = type(full()).merge([full(), full(sliding_window=7), full()])
    assert merged == full(sliding_window=7)
    with pytest.raises(ValueError, match="one sliding window"):
        type(full()).merge([full(sliding_window=7), full(sliding_window=8)])
    with pytest.raises(ValueError, match="equal specs"):
        type(full()).merge([full(), full(head_size=64)])


def test_uniform_collections():
    assert window(5).is_uniform_with_collection({"a": window(5, head_size=8)})
    assert not window(5).is_uniform_with_collection({"a": window(6)})
    assert not recurrent().is_uniform_with_collection({"a": recurrent(num_speculative_blocks=1)})
    members = {"a": full(), "b": full(head_size=64)}
    uniform = UniformTypeKVCacheSpecs(16, members)
    assert uniform.page_size_bytes == 65536 + 16384
    config = vllm_config(max_model_len=1000)
    assert uniform.max_memory_usage_bytes(config) == 63 * uniform.page_size_bytes
