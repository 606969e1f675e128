# SPDX-License-Identifier: Apache-2.0
"""Arenas of pipeline stages: other bytes, equal pages and block ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_cases import full, hidden, recurrent, vllm_config, window

from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.core.arena_sizing import estimate_max_model_len, get_kv_cache_configs
from vllm.v1.core.staged_arena import (
    estimate_staged_max_model_len,
    get_stage_configs,
    whole_config,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

MIB = 1 << 20
KINDS = {"r": recurrent, "a": full, "w": partial(window, 128)}


def staged(num_stages: int, tp_size: int = 1) -> VllmConfig:
    config: Any = vllm_config()
    config.parallel_config = ParallelConfig(
        pipeline_parallel_size=num_stages, tensor_parallel_size=tp_size
    )
    return config


def layers(kinds: str, first: int = 0) -> dict[str, KVCacheSpec]:
    return {f"{kind}{first + i}": KINDS[kind]() for i, kind in enumerate(kinds)}


def check(configs: list[KVCacheConfig], specs: list[dict[str, KVCacheSpec]]) -> None:
    for config, own in zip(configs, specs, strict=True):
        plan = config.plan
        assert plan.num_pages == configs[0].plan.num_pages
        assert {name for group in config.kv_cache_groups for name in group.layer_names} == set(own)
        for index, (group, placed) in enumerate(
            zip(config.kv_cache_groups, plan.groups, strict=True)
        ):
            first = configs[0]
            assert group.kv_cache_spec == first.kv_cache_groups[index].kv_cache_spec
            assert placed.blocks_per_page == first.plan.groups[index].blocks_per_page
            assert plan.page_bytes % (256 * placed.blocks_per_page) == 0
            assert placed.block_bytes <= plan.block_stride(index)
            ends = [
                placed.layer_offsets[name] + group.kv_cache_spec.page_size_bytes
                for name in group.layer_names
            ]
            assert placed.block_bytes == max(ends, default=0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text("raw", min_size=1, max_size=6), min_size=2, max_size=4), st.data())
def test_a_block_id_is_valid_on_every_stage(kinds: list[str], data: st.DataObject) -> None:
    specs = [layers(own, 100 * stage) for stage, own in enumerate(kinds)]
    available = [data.draw(st.integers(900, 1500)) * MIB for _ in kinds]
    config = staged(len(kinds))
    configs = get_stage_configs(config, specs, available)
    check(configs, specs)
    for stage, memory in zip(configs, available, strict=True):
        assert stage.plan.num_pages * stage.plan.page_bytes <= memory
    whole = whole_config(config, configs)
    names = [name for group in whole.kv_cache_groups for name in group.layer_names]
    assert sorted(names) == sorted(name for own in specs for name in own)
    assert whole.plan.page_bytes == sum(one.plan.page_bytes for one in configs)
    assert len(whole.kv_cache_tensors) == len(names)


def test_equal_stages_waste_no_more_than_one_device() -> None:
    kinds = "rrra"
    one = get_kv_cache_configs(vllm_config(), [layers(kinds * 2)], [1000 * MIB])[0]
    specs = [layers(kinds), layers(kinds, 4)]
    configs = get_stage_configs(staged(2), specs, [500 * MIB] * 2)
    assert configs[0].num_blocks >= one.num_blocks * 0.98


def test_the_stage_with_the_least_memory_decides() -> None:
    specs = [layers("aa"), layers("aa", 2)]
    configs = get_stage_configs(staged(2), specs, [100 * MIB, 60 * MIB])
    assert configs[0].num_blocks == 60 * MIB // configs[1].plan.page_bytes


def test_captured_states_lie_on_one_stage() -> None:
    specs = [layers("ra"), {**layers("ra", 2), "h": hidden()}]
    configs = get_stage_configs(staged(2), specs, [1000 * MIB] * 2)
    check(configs, specs)
    assert [group.layer_names for group in configs[0].kv_cache_groups] == [["r0"], ["a1"], []]
    assert configs[1].kv_cache_groups[2].layer_names == ["h"]


def test_workers_of_one_stage_are_alike() -> None:
    specs = [layers("aa"), layers("aa"), layers("ra", 2), layers("ra", 2)]
    configs = get_stage_configs(staged(2, tp_size=2), specs, [1000 * MIB] * 4)
    assert configs[0] is configs[1] and configs[2] is configs[3]
    assert configs[0] is not configs[2]
    with pytest.raises(ValueError, match="different layers"):
        get_stage_configs(staged(2, tp_size=2), specs[1:] + specs[:1], [1000 * MIB] * 4)


def test_the_longest_request_fits_every_stage() -> None:
    specs = [layers("aa"), layers("aaaa", 2)]
    config = staged(2)
    memory = [100 * MIB, 2 * MIB]
    longest = estimate_staged_max_model_len(config, specs, memory)
    assert longest == estimate_max_model_len(vllm_config(), specs[1], 2 * MIB)
    with pytest.raises(ValueError, match=f"longest that fits is {longest}"):
        get_stage_configs(config, specs, memory)
    config.model_config.max_model_len = longest
    get_stage_configs(config, specs, memory)


def test_stages_without_state() -> None:
    configs = get_stage_configs(staged(2), [layers("aa"), {}], [100 * MIB] * 2)
    check(configs, [layers("aa"), {}])
    assert configs[1].plan.page_bytes < configs[0].plan.page_bytes
