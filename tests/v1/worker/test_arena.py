# SPDX-License-Identifier: Apache-2.0
"""Views into the arena: disjoint, complete, and where the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm.exceptions import VLLMValidationError
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.worker.arena import Arena

CPU = torch.device("cpu")
NUM_PAGES = 6


def _config() -> KVCacheConfig:
    attention = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=24, dtype=torch.bfloat16)
    uneven = replace(attention, head_size_v=40)
    recurrent = MambaSpec(
        block_size=512,
        shapes=((3, 40), (4, 6, 10)),
        dtypes=(torch.bfloat16, torch.float32),
    )
    hidden = HiddenStateCacheSpec(
        block_size=16,
        num_kv_heads=3,
        head_size=20,
        dtype=torch.bfloat16,
        cache_dtype_str=None,
    )
    groups = [
        KVCacheGroupSpec(["r0", "r1", "r2"], recurrent),
        KVCacheGroupSpec(["a0", "a1"], attention),
        KVCacheGroupSpec(["u0", "u1"], uneven),
        KVCacheGroupSpec(["h"], hidden),
    ]
    return KVCacheConfig(0, [], groups, plan_arena(groups, NUM_PAGES))


def test_more_than_there_is_is_an_error_that_says_what_to_give() -> None:
    config = _config()
    pages = 2**62 // config.plan.page_bytes
    config = replace(config, plan=plan_arena(config.kv_cache_groups, pages))
    with pytest.raises(VLLMValidationError, match=r"no room for the state memory, .* GiB on cpu"):
        Arena(config, CPU)


def _tensors(arena: Arena, name: str) -> tuple[torch.Tensor, ...]:
    view = arena.layers[name]
    return view if isinstance(view, tuple) else (view,)


def test_shapes_and_strides() -> None:
    config = _config()
    arena = Arena(config, CPU)
    page_bytes = config.plan.page_bytes
    for group, plan in zip(config.kv_cache_groups, config.plan.groups, strict=True):
        stride = page_bytes // plan.blocks_per_page
        for name in group.layer_names:
            for tensor in _tensors(arena, name):
                assert tensor.shape[0] == NUM_PAGES * plan.blocks_per_page
                assert tensor.stride(0) * tensor.element_size() == stride
                assert tensor[0].is_contiguous()
    assert arena.layers["a0"].shape[1:] == (2, 16, 2, 24)  # type: ignore[union-attr]
    assert arena.layers["h"].shape[1:] == (16, 3, 20)  # type: ignore[union-attr]
    conv, state = _tensors(arena, "r0")
    keys, values = _tensors(arena, "u1")
    assert keys.shape[1:] == (16, 2, 24) and values.shape[1:] == (16, 2, 40)
    assert conv.shape[1:] == (3, 40) and state.dtype == torch.float32


def test_layers_of_a_page_do_not_overlap() -> None:
    config = _config()
    arena = Arena(config, CPU)
    for gid, group in enumerate(config.kv_cache_groups):
        arena.buffer.zero_()
        written = 0
        for name in group.layer_names:
            for tensor in _tensors(arena, name):
                tensor.view(torch.uint8 if tensor.dim() == 0 else tensor.dtype).fill_(1)
                written += tensor.numel() * tensor.element_size()
        touched = sum(
            int((t != 0).sum()) * t.element_size()
            for name in group.layer_names
            for t in _tensors(arena, name)
        )
        assert touched == written, f"layers of group {gid} overlap"


def test_a_block_stays_in_its_page() -> None:
    config = _config()
    arena = Arena(config, CPU)
    pages = arena.buffer.view(NUM_PAGES, -1)
    for group, plan in zip(config.kv_cache_groups, config.plan.groups, strict=True):
        for block in range(NUM_PAGES * plan.blocks_per_page):
            arena.buffer.zero_()
            for name in group.layer_names:
                for tensor in _tensors(arena, name):
                    tensor[block].fill_(1)
            used = torch.nonzero(pages.any(dim=1)).flatten().tolist()
            assert used == [block // plan.blocks_per_page]
