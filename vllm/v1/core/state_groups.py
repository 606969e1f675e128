# SPDX-License-Identifier: Apache-2.0
"""Groups of layers: one per distinct spec, so that costs grow with kinds of layer, not layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def create_kv_cache_group_specs(
    specs: dict[str, KVCacheSpec], grouped_names: Sequence[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    """One group per list of names, its spec the merge of its members'."""
    return [
        KVCacheGroupSpec(list(names), type(specs[names[0]]).merge([specs[n] for n in names]))
        for names in grouped_names
    ]


def is_kv_cache_spec_uniform(specs: dict[str, KVCacheSpec]) -> bool:
    """Whether all layers could form one group."""
    if not specs:
        return True
    members = list(specs.values())
    try:
        type(members[0]).merge(members)
    except ValueError:
        return False
    return True


def unify_hybrid_kv_cache_specs(specs: dict[str, KVCacheSpec]) -> None:
    """Turn windowed and chunked layers into full ones, in place, with the window noted.

    `ValueError` if the layers still cannot form one group.
    """
    for name, spec in specs.items():
        if isinstance(spec, SlidingWindowSpec):
            specs[name] = replace(
                _as_full(spec), head_size_v=spec.head_size_v, sliding_window=spec.sliding_window
            )
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            specs[name] = replace(_as_full(spec), attention_chunk_size=spec.attention_chunk_size)
    if not is_kv_cache_spec_uniform(specs):
        raise ValueError(
            "the model's layers keep state of different kinds and cannot share one group; "
            "remove --disable-hybrid-kv-cache-manager (and use a connector that supports "
            f"several groups). Kinds: {sorted({type(s).__name__ for s in specs.values()})}"
        )


def _as_full(spec: AttentionSpec) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
        page_size_padded=spec.page_size_padded,
        indexes_kv_by_block_stride=spec.indexes_kv_by_block_stride,
    )


def get_kv_cache_groups(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Groups of the layers in `specs` (layer order): one per distinct spec in first-seen order.

    `HiddenStateCacheSpec` layers come last, each a group of its own. With
    `disable_hybrid_kv_cache_manager` windowed layers keep every token, and everything but hidden
    states is one group. `ValueError` for a spec the arena cannot keep.
    """
    others = {n: s for n, s in specs.items() if not isinstance(s, HiddenStateCacheSpec)}
    captured = {n: s for n, s in specs.items() if isinstance(s, HiddenStateCacheSpec)}
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        unify_hybrid_kv_cache_specs(others)
        grouped = [list(others)] if others else []
    else:
        grouped = _names_by_spec(others)
    kept = {**others, **captured}
    for name, spec in kept.items():
        _check_spec(name, spec, vllm_config.cache_config.block_size)
    return create_kv_cache_group_specs(kept, [*grouped, *([name] for name in captured)])


def _names_by_spec(specs: dict[str, KVCacheSpec]) -> list[list[str]]:
    names: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        names.setdefault(spec, []).append(name)
    return list(names.values())


def _check_spec(name: str, spec: KVCacheSpec, block_size: int) -> None:
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "none":
            raise ValueError(
                f"layer {name}: mamba_cache_mode {spec.mamba_cache_mode!r} is not supported; the "
                "arena keeps one state per request, use 'none'"
            )
        return
    if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)):
        raise ValueError(
            f"layer {name}: no cache manager for {type(spec).__name__}; supported are full and "
            "sliding-window attention, MLA, hidden states and recurrent state"
        )
    if spec.block_size != block_size:
        raise ValueError(
            f"layer {name}: its spec has {spec.block_size} tokens per block, but every paged "
            f"layer must use --block-size ({block_size})"
        )
