# SPDX-License-Identifier: Apache-2.0
"""How many pages there are, and what fits."""

import re

import pytest
from state_cases import full, hidden, recurrent, request, vllm_config, window

from vllm import decisions
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

PAGE = 65536
MIB = 1 << 20
HYBRID = {"r0": recurrent(), "r1": recurrent(), "a": full(), "h": hidden()}


def test_one_group_pages_are_blocks():
    (config,) = get_kv_cache_configs(vllm_config(), [{"a": full()}], [100 * PAGE + 5])
    assert config.num_blocks == config.plan.num_pages == 100
    assert config.plan.page_bytes == PAGE
    assert get_kv_cache_capacity(vllm_config(), config) == (99 * 16, 99 * 16 / 1024)
    assert not config.has_mamba_layers


def test_workers_agree_on_the_least_memory():
    specs = {"a": full()}
    configs = get_kv_cache_configs(vllm_config(), [specs, dict(specs)], [100 * PAGE, 90 * PAGE])
    assert [c.num_blocks for c in configs] == [90, 90]
    with pytest.raises(ValueError, match="different layers"):
        get_kv_cache_configs(vllm_config(), [specs, {"b": full()}], [100 * PAGE] * 2)


def test_override_counts_pages_and_is_recorded():
    decisions.clear()
    config = vllm_config(num_gpu_blocks_override=70)
    assert get_kv_cache_configs(config, [{"a": full()}], [100 * PAGE])[0].num_blocks == 70
    chosen = {d.what: d for d in decisions.decisions()}
    assert (chosen["arena pages"].chosen, chosen["arena pages"].instead_of) == ("70", "100")
    assert f"70 pages of {PAGE} bytes" in chosen["state arena"].chosen
    with pytest.raises(ValueError, match="--num-gpu-blocks-override 70 asks for .* 60 pages"):
        get_kv_cache_configs(config, [{"a": full()}], [60 * PAGE])


def test_tensors_describe_the_views():
    (config,) = get_kv_cache_configs(vllm_config(), [HYBRID], [1000 * MIB])
    plan = config.plan
    assert config.has_mamba_layers
    assert [t.shared_by for t in config.kv_cache_tensors] == [["r0"], ["r1"], ["a"], ["h"]]
    for tensor, group_id in zip(config.kv_cache_tensors, (0, 0, 1, 2), strict=True):
        name = tensor.shared_by[0]
        assert tensor.offset == plan.groups[group_id].layer_offsets[name]
        assert tensor.block_stride == plan.block_stride(group_id)
        assert tensor.size == HYBRID[name].page_size_bytes * plan.num_blocks(group_id)
    assert type(config.kv_cache_groups[-1].kv_cache_spec) is HiddenStateCacheSpec


def test_stateless_model():
    (config,) = get_kv_cache_configs(vllm_config(), [{}], [0])
    assert (config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups) == (1, [], [])
    with pytest.raises(ValueError, match="without state"):
        get_kv_cache_capacity(vllm_config(), config)
    assert estimate_max_model_len(vllm_config(max_model_len=77), {}, 0) == 77


@pytest.mark.parametrize("available", [-5, 0, PAGE, 2 * PAGE - 1])
def test_no_memory(available):
    with pytest.raises(ValueError, match="No memory.*--gpu-memory-utilization"):
        get_kv_cache_configs(vllm_config(), [{"a": full()}], [available])


@pytest.mark.parametrize("specs", [{"a": full()}, HYBRID, {"a": full(), "w": window(50)}])
@pytest.mark.parametrize("available", [40 * MIB, 50 * MIB, 60 * MIB])
def test_message_names_the_longest_length_that_fits(specs, available):
    config = vllm_config(max_model_len=200_000)
    with pytest.raises(ValueError, match="--max-model-len") as error:
        get_kv_cache_configs(config, [specs], [available])
    assert "VLLM_CPU_KVCACHE_SPACE" in str(error.value)
    assert "--num-gpu-blocks-override" not in str(error.value)
    longest = int(re.search(r"longest that fits is (\d+)", str(error.value)).group(1))
    assert estimate_max_model_len(config, specs, available) == longest > 0
    check_enough_kv_cache_memory(vllm_config(max_model_len=longest), specs, available)
    get_kv_cache_configs(vllm_config(max_model_len=longest), [specs], [available])
    with pytest.raises(ValueError):
        check_enough_kv_cache_memory(vllm_config(max_model_len=longest + 1), specs, available)


def test_estimate_counts_the_override():
    config = vllm_config(max_model_len=200_000, num_gpu_blocks_override=11)
    assert estimate_max_model_len(config, {"a": full()}, 100 * PAGE) == 160
    assert estimate_max_model_len(vllm_config(), {"a": full()}, 0) == 0


def test_message_without_any_length():
    with pytest.raises(ValueError, match="Not even one token fits.*--num-gpu-blocks-override"):
        get_kv_cache_configs(vllm_config(num_gpu_blocks_override=2), [HYBRID], [100 * MIB])


def _fill(config, vllm_cfg, num_requests):
    """Run requests of `max_model_len` in the largest steps allowed; how many fit at once."""
    step = vllm_cfg.scheduler_config.max_num_batched_tokens
    longest = vllm_cfg.model_config.max_model_len
    manager = KVCacheManager(config, longest, max_num_batched_tokens=step, enable_caching=False)
    for n in range(num_requests):
        req = request(str(n), range(longest))
        while req.num_computed_tokens < longest:
            chunk = min(step, longest - req.num_computed_tokens)
            if manager.allocate_slots(req, chunk) is None:
                return n
            req.num_computed_tokens += chunk
    return num_requests


@pytest.mark.parametrize("specs", [{"a": full()}, HYBRID, {"a": full(), "r": recurrent()}])
def test_capacity_is_what_the_allocator_holds(specs):
    vllm_cfg = vllm_config(max_model_len=1000)
    (config,) = get_kv_cache_configs(vllm_cfg, [specs], [97 * MIB])
    tokens, concurrency = get_kv_cache_capacity(vllm_cfg, config)
    assert concurrency == tokens / 1000 == get_max_concurrency_for_kv_cache_config(vllm_cfg, config)
    assert concurrency > 3
    assert _fill(config, vllm_cfg, 100) == int(concurrency)


def test_windowed_request_needs_no_more_than_its_share():
    """What one request takes at most is what admission reckons with, never more."""
    vllm_cfg = vllm_config(max_model_len=5000, max_num_batched_tokens=96)
    specs = {"w": window(50)}
    (config,) = get_kv_cache_configs(vllm_cfg, [specs], [PAGE * 12])  # 11 usable
    assert _fill(config, vllm_cfg, 1) == 1
    with pytest.raises(ValueError, match="needs 12 pages"):
        get_kv_cache_configs(
            vllm_config(max_model_len=5000, max_num_batched_tokens=112), [specs], [PAGE * 12]
        )
