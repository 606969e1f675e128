# SPDX-License-Identifier: Apache-2.0
"""Groups of layers: one per distinct spec, so that costs grow with kinds of layer, not layers."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec


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
        specs[name] = spec.keeping_every_token()
    if not is_kv_cache_spec_uniform(specs):
        raise ValueError(
            "the model's layers keep state of different kinds and cannot share one group; "
            "remove --disable-hybrid-kv-cache-manager (and use a connector that supports "
            f"several groups). Kinds: {sorted({type(s).__name__ for s in specs.values()})}"
        )


def get_kv_cache_groups(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Groups of the layers in `specs` (layer order): one per distinct spec in first-seen order.

    `HiddenStateCacheSpec` layers come last, each a group of its own. With
    `disable_hybrid_kv_cache_manager` windowed layers keep every token, and everything but hidden
    states is one group. `--block-sizes` gives kinds of state larger blocks. `ValueError` for a spec
    the arena cannot keep, and for a kind of state that no layer keeps.
    """
    others = {n: s for n, s in specs.items() if not s.is_hidden_states}
    captured = {n: s for n, s in specs.items() if s.is_hidden_states}
    unified = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    if unified:
        unify_hybrid_kv_cache_specs(others)
    kept = _with_block_sizes({**others, **captured}, vllm_config.cache_config.block_sizes)
    grouped = [list(others)] if unified else _names_by_spec({name: kept[name] for name in others})
    for name, spec in kept.items():
        refusal = spec.refusal(vllm_config.cache_config.block_size)
        if refusal is not None:
            raise ValueError(f"layer {name}: {refusal}")
    grouped = [names for names in grouped if names]
    return create_kv_cache_group_specs(kept, [*grouped, *([name] for name in captured)])


def _with_block_sizes(
    specs: dict[str, KVCacheSpec], sizes: dict[str, int]
) -> dict[str, KVCacheSpec]:
    """`specs` with the blocks that their kinds are to have; a recurrent state has no tokens."""
    kinds = {spec.kind for spec in specs.values() if not spec.is_recurrent}
    if unknown := sizes.keys() - kinds:
        raise VLLMValidationError(
            f"--block-sizes: no layer keeps {sorted(unknown)}; this model's kinds of state with "
            f"blocks of tokens: {sorted(kinds)}"
        )
    for name, spec in specs.items():
        size = sizes.get(spec.kind, spec.block_size)
        if size % spec.tokens_per_row:
            raise VLLMValidationError(
                f"--block-sizes: {size} tokens for {spec.kind!r} are no multiple of the "
                f"{spec.tokens_per_row} that a row of layer {name} stands for"
            )
    return {
        name: spec.copy_with_new_block_size(sizes.get(spec.kind, spec.block_size))
        for name, spec in specs.items()
    }


def _names_by_spec(specs: dict[str, KVCacheSpec]) -> list[list[str]]:
    names: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        names.setdefault(spec, []).append(name)
    return list(names.values())
