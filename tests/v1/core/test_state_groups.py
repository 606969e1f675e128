# SPDX-License-Identifier: Apache-2.0
"""Grouping: one group per distinct spec, hidden states last."""

from typing import Any

import pytest
import torch
from state_cases import full, hidden, recurrent, vllm_config, window

from vllm.exceptions import VLLMValidationError
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)


def hybrid() -> dict[str, KVCacheSpec]:
    specs: dict[str, KVCacheSpec] = {"cache_only_layers.0": hidden()}
    for i in range(8):
        specs[f"layers.{i}"] = full() if i % 4 == 3 else recurrent()
    return specs


def test_one_group_per_spec_in_first_seen_order():
    groups = get_kv_cache_groups(vllm_config(), hybrid())
    assert [g.layer_names for g in groups] == [
        [f"layers.{i}" for i in (0, 1, 2, 4, 5, 6)],
        ["layers.3", "layers.7"],
        ["cache_only_layers.0"],
    ]
    assert [g.kv_cache_spec for g in groups] == [recurrent(), full(), hidden()]


def test_hidden_state_layers_stay_alone():
    specs = {"a": hidden(), "b": full(), "c": hidden()}
    groups = get_kv_cache_groups(vllm_config(), specs)
    assert [g.layer_names for g in groups] == [["b"], ["a"], ["c"]]
    only = get_kv_cache_groups(vllm_config(), {"a": hidden()})
    assert [type(g.kv_cache_spec) for g in only] == [HiddenStateCacheSpec]


def test_equal_configurations_give_equal_groups():
    assert get_kv_cache_groups(vllm_config(), hybrid()) == get_kv_cache_groups(
        vllm_config(), hybrid()
    )
    assert get_kv_cache_groups(vllm_config(), {}) == []


def test_different_windows_are_different_groups():
    specs = {"a": window(64), "b": window(32), "c": window(64)}
    groups = get_kv_cache_groups(vllm_config(), specs)
    assert [g.layer_names for g in groups] == [["a", "c"], ["b"]]
    assert not is_kv_cache_spec_uniform(specs)
    assert is_kv_cache_spec_uniform({"a": full(), "b": full(sliding_window=3)})
    assert is_kv_cache_spec_uniform({})


def test_disabled_allocator_makes_one_full_group():
    config = vllm_config(disable_hybrid_kv_cache_manager=True)
    specs = {"a": full(), "b": window(64), "h": hidden()}
    groups = get_kv_cache_groups(config, specs)
    assert [g.layer_names for g in groups] == [["a", "b"], ["h"]]
    assert groups[0].kv_cache_spec == full(sliding_window=64)
    assert specs["b"] == window(64), "the caller's specs are untouched"
    with pytest.raises(ValueError, match="disable-hybrid-kv-cache-manager"):
        get_kv_cache_groups(config, hybrid())


def test_unify_keeps_value_width():
    specs: dict[str, KVCacheSpec] = {"a": window(64, head_size_v=128)}
    unify_hybrid_kv_cache_specs(specs)
    assert specs["a"] == full(head_size_v=128, sliding_window=64)


def test_unsupported_specs_are_refused():
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=256, dtype=torch.bfloat16, attention_chunk_size=64
    )
    with pytest.raises(ValueError, match="ChunkedLocalAttentionSpec"):
        get_kv_cache_groups(vllm_config(), {"x": chunked})
    config = vllm_config(disable_hybrid_kv_cache_manager=True)
    unified = get_kv_cache_groups(config, {"x": chunked})
    assert unified[0].kv_cache_spec == full(attention_chunk_size=64)
    with pytest.raises(ValueError, match="mamba_cache_mode 'align'"):
        get_kv_cache_groups(vllm_config(), {"x": recurrent(mamba_cache_mode="align")})
    with pytest.raises(ValueError, match="layer y: .*24 tokens per block"):
        get_kv_cache_groups(vllm_config(), {"x": full(), "y": full(block_size=24)})


def test_kinds_of_state_with_larger_blocks():
    specs = {"a": full(), "b": window(20), "c": recurrent(block_size=4096), "d": hidden()}
    sizes = {"sliding_window": 64, "hidden_states": 32}
    groups = get_kv_cache_groups(vllm_config(block_sizes=sizes), specs)
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 64, 4096, 32]
    for kind in ("mla_attention", "mamba", "nonsense"):
        message = rf"no layer keeps \['{kind}'\].*'full_attention'"
        with pytest.raises(VLLMValidationError, match=message):
            get_kv_cache_groups(vllm_config(block_sizes={kind: 32}), specs)
    config = vllm_config(block_sizes=sizes, disable_hybrid_kv_cache_manager=True)
    with pytest.raises(ValueError, match="no layer keeps .'sliding_window'"):
        get_kv_cache_groups(config, {"a": full(), "b": window(20), "d": hidden()})


def compressed() -> dict[str, KVCacheSpec]:
    row: Any = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32, "block_size": 128}
    return {
        "a": SlidingWindowMLASpec(**row, sliding_window=20),
        "b": MLAAttentionSpec(**row, compress_ratio=4),
        "c": MLAAttentionSpec(**row, compress_ratio=128),
        "d": SlidingWindowMLASpec(**row, sliding_window=20),
    }


def test_compress_ratios_are_different_groups():
    groups = get_kv_cache_groups(vllm_config(), compressed())
    assert [g.layer_names for g in groups] == [["a", "d"], ["b"], ["c"]]
    larger = get_kv_cache_groups(vllm_config(block_sizes={"mla_attention": 256}), compressed())
    assert [g.kv_cache_spec.block_size for g in larger] == [128, 256, 256]
    message = "--block-sizes: 64 tokens for 'mla_attention' are no multiple of the 128 .* layer c"
    with pytest.raises(VLLMValidationError, match=message):
        get_kv_cache_groups(vllm_config(block_sizes={"mla_attention": 64}), compressed())
    with pytest.raises(ValueError, match="cannot share one group"):
        get_kv_cache_groups(vllm_config(disable_hybrid_kv_cache_manager=True), compressed())


def test_a_window_of_rows_alone_can_keep_every_token():
    specs = {name: spec for name, spec in compressed().items() if spec.window}
    (group,) = get_kv_cache_groups(vllm_config(disable_hybrid_kv_cache_manager=True), specs)
    assert type(group.kv_cache_spec) is MLAAttentionSpec and group.layer_names == ["a", "d"]
