# SPDX-License-Identifier: Apache-2.0
"""How many pages the arena gets, what a request costs, and what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm import decisions
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.arena_planner import ALIGNMENT, plan_arena
from vllm.v1.core.state_groups import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

GIB = 1 << 30


def pages_per_request(
    groups: Sequence[KVCacheGroupSpec],
    plan: ArenaPlan,
    max_num_batched_tokens: int,
    num_tokens: int,
    max_model_len: int | None = None,
) -> int:
    """Pages needed to hold `num_tokens` tokens at once, with nothing else in the arena.

    One request, or, with `max_model_len`, as many full requests as go into `num_tokens` and one
    with the rest; requests share pages.
    """
    longest = max_model_len or num_tokens
    full, rest = divmod(num_tokens, longest)
    pages = 0
    for group, group_plan in zip(groups, plan.groups, strict=True):
        spec = group.kv_cache_spec
        blocks = full and full * spec.blocks_per_request(max_num_batched_tokens, longest)
        blocks += rest and spec.blocks_per_request(max_num_batched_tokens, rest)
        pages += -(-blocks // group_plan.blocks_per_page)
    return pages


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest `n <= limit` with `fits(n)` for a monotone `fits`; 0 if there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def max_len_that_fits(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], plan: ArenaPlan
) -> int:
    """The longest request, up to the configured `max_model_len`, that the plan's pages hold."""
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    return largest(
        vllm_config.model_config.max_model_len,
        lambda n: pages_per_request(groups, plan, batched, n) < plan.num_pages,
    )


def estimate_max_model_len(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], available_bytes: int
) -> int:
    """The longest request, up to the configured `max_model_len`, that `available_bytes` (or the
    pages of `num_gpu_blocks_override`) hold; 0 if not even one token fits."""
    groups = get_kv_cache_groups(vllm_config, specs)
    if not groups:
        return vllm_config.model_config.max_model_len
    plan = filled(vllm_config, plan_arena(groups, num_pages=1), available_bytes)
    return max_len_that_fits(vllm_config, groups, plan)


def filled(vllm_config: VllmConfig, plan: ArenaPlan, available_bytes: int) -> ArenaPlan:
    """With as many pages as there is memory for, or as `num_gpu_blocks_override` says."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    pages = available_bytes // plan.page_bytes if override is None else override
    return replace(plan, num_pages=max(pages, 1))


def check_enough_kv_cache_memory(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], available_bytes: int
) -> None:
    """`ValueError` unless one request of `max_model_len` fits into `available_bytes`."""
    groups = get_kv_cache_groups(vllm_config, specs)
    if groups:
        plan = plan_arena(groups, num_pages=1)
        plan = replace(plan, num_pages=available_bytes // plan.page_bytes)
        check_fits(vllm_config, groups, plan)


_MORE_MEMORY = (
    "raise --gpu-memory-utilization or --kv-cache-memory-bytes (on CPU: the environment variable "
    "VLLM_CPU_KVCACHE_SPACE, in GiB)"
)


def check_fits(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], plan: ArenaPlan
) -> None:
    """`ValueError` unless the plan's pages hold one request of `max_model_len`."""
    page = plan.page_bytes
    if plan.num_pages < 2:
        raise VLLMValidationError(
            "No memory is left for the model's state: the arena needs at least 2 pages of "
            f"{page / GIB:.3f} GiB and gets {max(plan.num_pages, 0)}; {_MORE_MEMORY}."
        )
    longest = vllm_config.model_config.max_model_len
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    needed = pages_per_request(groups, plan, batched, longest)
    if needed < plan.num_pages:
        return
    fits = max_len_that_fits(vllm_config, groups, plan)
    if fits > 0:
        advice = f"The longest that fits is {fits}: lower --max-model-len to it, or"
    else:
        advice = "Not even one token fits:"
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        advice += " raise --num-gpu-blocks-override (arena pages),"
    raise VLLMValidationError(
        f"One request of max_model_len {longest} needs {needed} pages of state "
        f"({needed * page / GIB:.3f} GiB), but only {plan.num_pages - 1} "
        f"({(plan.num_pages - 1) * page / GIB:.3f} GiB) are available. {advice} {_MORE_MEMORY}."
    )


def num_pages_for(vllm_config: VllmConfig, page_bytes: int, available_bytes: int) -> int:
    """Pages of the arena: all that there is memory for, or `--num-gpu-blocks-override`."""
    pages = max(available_bytes // page_bytes, 0)
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is None:
        return pages
    if override > pages:
        raise VLLMValidationError(
            f"--num-gpu-blocks-override {override} asks for {override * page_bytes / GIB:.3f} GiB "
            f"({page_bytes} bytes per page), but only {max(available_bytes, 0) / GIB:.3f} GiB are "
            f"available, {pages} pages"
        )
    decisions.record("arena pages", override, "--num-gpu-blocks-override", instead_of=pages)
    return override


def kv_cache_tensors(groups: Sequence[KVCacheGroupSpec], plan: ArenaPlan) -> list[KVCacheTensor]:
    """Where every layer of every group lies."""
    return [
        KVCacheTensor(
            size=group.kv_cache_spec.page_size_bytes * plan.num_blocks(group_id),
            shared_by=[name],
            offset=plan.groups[group_id].layer_offsets[name],
            block_stride=plan.block_stride(group_id),
        )
        for group_id, group in enumerate(groups)
        for name in group.layer_names
    ]


def get_kv_cache_config_from_groups(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], available_bytes: int
) -> KVCacheConfig:
    """The arena for `groups` in `available_bytes`.

    A model without state gets a single null page. `ValueError` if one request of `max_model_len`
    does not fit, naming the longest that would.
    """
    if not groups:
        return KVCacheConfig(1, [], [], ArenaPlan(ALIGNMENT, 1, ()))
    plan = plan_arena(groups, num_pages=1)
    plan = replace(plan, num_pages=num_pages_for(vllm_config, plan.page_bytes, available_bytes))
    check_fits(vllm_config, groups, plan)
    return config_of(groups, plan)


def config_of(groups: Sequence[KVCacheGroupSpec], plan: ArenaPlan) -> KVCacheConfig:
    """What follows from a plan."""
    return KVCacheConfig(plan.num_pages, kv_cache_tensors(groups, plan), list(groups), plan)


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    specs_per_worker: Sequence[dict[str, KVCacheSpec]],
    available_bytes_per_worker: Sequence[int],
) -> list[KVCacheConfig]:
    """One equal configuration per worker, sized by the worker with the least memory.

    `ValueError` if the workers' layers differ (pipeline stages are not supported), or if one
    request of `max_model_len` does not fit.
    """
    check_same_layers(specs_per_worker)
    groups = get_kv_cache_groups(vllm_config, specs_per_worker[0])
    config = get_kv_cache_config_from_groups(vllm_config, groups, min(available_bytes_per_worker))
    record_plan(config)
    return [config for _ in specs_per_worker]


def check_same_layers(specs_per_worker: Sequence[dict[str, KVCacheSpec]]) -> None:
    """`ValueError` unless every worker has the same layers."""
    first = specs_per_worker[0]
    if any(list(specs.items()) != list(first.items()) for specs in specs_per_worker):
        raise VLLMValidationError(
            "workers hold different layers; the arena needs the same layers on every worker, "
            "use --pipeline-parallel-size 1"
        )


def record_plan(config: KVCacheConfig) -> None:
    """The arena as a decision."""
    plan = config.plan
    parts = [
        f"{type(group.kv_cache_spec).__name__} x{len(group.layer_names)}: "
        f"{group_plan.blocks_per_page} per page, {plan.padding(i):.2%} padding"
        for i, (group, group_plan) in enumerate(
            zip(config.kv_cache_groups, plan.groups, strict=True)
        )
    ]
    decisions.record(
        "state arena",
        f"{plan.num_pages} pages of {plan.page_bytes} bytes",
        "; ".join(parts) or "the model keeps no state",
    )


def get_kv_cache_capacity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[int, float]:
    """`(tokens, concurrency)` the arena holds at once in requests of `max_model_len`.

    Exact for this allocator: the most tokens in full-length requests and one shorter one, with
    pages shared between requests; concurrency is tokens over `max_model_len`. A model without
    state has no bound: `ValueError`.
    """
    groups, plan = kv_cache_config.kv_cache_groups, kv_cache_config.plan
    if not groups:
        raise ValueError("a model without state has no capacity limit")
    longest = vllm_config.model_config.max_model_len
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    blocks = max(plan.num_blocks(group_id) for group_id in range(len(groups)))
    tokens = largest(
        blocks * longest,
        lambda n: pages_per_request(groups, plan, batched, n, longest) < plan.num_pages,
    )
    return tokens, tokens / longest


def get_max_concurrency_for_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> float:
    """Requests of `max_model_len` that run at once; see `get_kv_cache_capacity`."""
    return get_kv_cache_capacity(vllm_config, kv_cache_config)[1]
