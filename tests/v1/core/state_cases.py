# SPDX-License-Identifier: Apache-2.0
"""Specs, configurations and requests for the state-memory tests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm.utils.hashing import sha256
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    FullAttentionSpec,
    GroupPlan,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 16


def full(**changes: Any) -> FullAttentionSpec:
    """64 KiB per block with the default sizes of Qwen3.5-4B."""
    fields = {"num_kv_heads": 4, "head_size": 256, "dtype": torch.bfloat16, **changes}
    return FullAttentionSpec(**{"block_size": BLOCK, **fields})


def window(sliding_window: int, **changes: Any) -> SlidingWindowSpec:
    fields = {"num_kv_heads": 4, "head_size": 256, "dtype": torch.bfloat16, **changes}
    return SlidingWindowSpec(**{"block_size": BLOCK, **fields}, sliding_window=sliding_window)


def hidden(**changes: Any) -> HiddenStateCacheSpec:
    fields = {"num_kv_heads": 3, "head_size": 2560, "dtype": torch.bfloat16, **changes}
    return HiddenStateCacheSpec(**{"block_size": BLOCK, **fields})


def recurrent(**changes: Any) -> MambaSpec:
    """The gated delta net of Qwen3.5-4B: 2,146,304 bytes."""
    fields: dict[str, Any] = {
        "shapes": ((3, 8192), (32, 128, 128)),
        "dtypes": (torch.bfloat16, torch.float32),
        **changes,
    }
    return MambaSpec(**{"block_size": BLOCK, **fields})


def vllm_config(
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 256,
    num_gpu_blocks_override: int | None = None,
    disable_hybrid_kv_cache_manager: bool = False,
    block_sizes: dict[str, int] | None = None,
) -> Any:
    """The fields of a VllmConfig that state memory reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_num_batched_tokens,
            disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK,
            num_gpu_blocks_override=num_gpu_blocks_override,
            block_sizes=block_sizes or {},
        ),
    )


def plan_of(*blocks_per_page: int, num_pages: int) -> ArenaPlan:
    """A plan with these capacities; sizes are made up."""
    page_bytes = 256
    for count in blocks_per_page:
        page_bytes *= count
    groups = [GroupPlan(r, page_bytes // r, {f"layer{r}": 0}) for r in blocks_per_page]
    return ArenaPlan(page_bytes, num_pages, tuple(groups))


def kv_config(
    specs: Sequence[KVCacheSpec],
    num_pages: int,
    blocks_per_page: Sequence[int] | None = None,
) -> KVCacheConfig:
    """One layer per spec; the planner's capacities unless given."""
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    if blocks_per_page is None:
        plan = plan_arena(groups, num_pages)
    else:
        plan = plan_of(*blocks_per_page, num_pages=num_pages)
    return KVCacheConfig(num_pages, [], groups, plan)


def manager_of(
    specs: Sequence[KVCacheSpec],
    num_pages: int,
    blocks_per_page: Sequence[int] | None = None,
    **options: Any,
) -> KVCacheManager:
    config = kv_config(specs, num_pages, blocks_per_page or [1] * len(specs))
    options = {"max_num_batched_tokens": 4096, "enable_caching": True, **options}
    return KVCacheManager(config, options.pop("max_model_len", 4096), **options)


def request(request_id: str, tokens: Sequence[int], **fields: Any) -> Request:
    return Request(
        request_id,
        list(tokens),
        fields.pop("sampling_params", None),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **fields,
    )


def run(manager: KVCacheManager, req: Request, num_tokens: int | None = None) -> bool:
    """Schedule one step of a request the way a scheduler does; False if there is no room."""
    blocks, hit = None, 0
    if req.num_computed_tokens == 0:
        blocks, hit = manager.get_computed_blocks(req)
    new = req.num_tokens - req.num_computed_tokens - hit if num_tokens is None else num_tokens
    if manager.allocate_slots(req, new, hit, blocks) is None:
        return False
    req.num_computed_tokens += hit + new
    return True


def done(manager: KVCacheManager, name: str, tokens) -> None:
    """A request that ran to its end."""
    req = request(name, tokens)
    assert run(manager, req)
    manager.free(req)


def step(manager: KVCacheManager, *requests: Request, budget: int = 10_000) -> list[BlockCopy]:
    """One scheduler step of these requests, cut where checkpoints are due; the copies it makes."""
    manager.begin_step()
    for req in requests:
        blocks, hit = None, 0
        if req.num_computed_tokens == 0:
            blocks, hit = manager.get_computed_blocks(req)
            manager.plan_checkpoints(req, hit)
        computed = req.num_computed_tokens + hit
        end = manager.chunk_end(req.request_id, computed) or req.num_tokens
        new = min(end - computed, budget)
        assert manager.allocate_slots(req, new, hit, blocks) is not None
        req.num_computed_tokens = computed + new
    before, after = manager.take_copies()
    return before + after


def generate(manager: KVCacheManager, req: Request, num_tokens: int, first: int = 100) -> None:
    """Compute the prompt and all but the last of `num_tokens` sampled tokens `first, ...`."""
    for i in range(num_tokens + 1):
        while req.num_computed_tokens < req.num_tokens:
            step(manager, req)
        if i < num_tokens:
            req.append_output_token_ids(first + i)
            if i == num_tokens - 1:
                return
