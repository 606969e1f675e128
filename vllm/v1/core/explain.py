# SPDX-License-Identifier: Apache-2.0
"""What an engine will allocate, computed from its configuration alone.

The layers say what they keep (`outline_model`), the engine's own planner lays it out; nothing here
repeats their arithmetic. docs/state_memory.md, "Explaining a configuration".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm import decisions
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.model_outline import common_outline, other_outlines, outline_model
from vllm.utils.torch_utils import dtype_name
from vllm.v1.core.arena_sizing import estimate_max_model_len, get_kv_cache_capacity
from vllm.v1.core.explain_decode import DecodeBatch, DecodeReport, explain_decode
from vllm.v1.core.explain_layout import OwnLayout, Rates, explain_own_layout, layout_of
from vllm.v1.core.explain_request import ByteUse, RequestCost, cost_of_request, use_of_bytes
from vllm.v1.core.layout_plan import Budget, Memory, memory_of, plan_layout, with_changes
from vllm.v1.core.link_speed import LinkSpeed
from vllm.v1.core.placed_arena import placed_config
from vllm.v1.core.state_groups import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    KVCacheConfig,
    KVCacheGroupSpec,
)

DEFAULT_LENGTHS = (12, 1_000, 32_000)
TP_SIZES = (1, 2, 4, 8)
BLOCK_SIZES = (16, 32, 64, 128)
STATE_DTYPES = ("float32", "bfloat16")
CACHE_DTYPES = (*STATE_DTYPES, "fp8")


@dataclass(frozen=True)
class GroupReport:
    """One group of layers with equal state.

    `data_bytes`: what its layers keep in one block; `stride_bytes`: what the block takes. Paged
    groups have `tokens_per_block` and `bytes_per_token`, recurrent ones `bytes_per_sequence`.
    """

    kind: str
    keeps: str
    layers: int
    data_bytes: int
    stride_bytes: int
    blocks_per_page: int
    padding: float
    tokens_per_block: int | None = None
    bytes_per_token: float | None = None
    bytes_per_sequence: int | None = None


@dataclass(frozen=True)
class WhatIf:
    """The same model and memory with one flag changed; per request length of the report.

    `refused`: why that cannot be, with the other fields zero or empty; `note`: what to know.
    """

    flag: str
    page_bytes: int = 0
    num_pages: int = 0
    arena_bytes: int = 0
    request_bytes: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    note: str = ""
    refused: str = ""


@dataclass(frozen=True)
class TierReport:
    """Memory behind the arena, of one rank: `capacity_tokens` as for the arena itself."""

    name: str
    num_pages: int
    num_bytes: int
    capacity_tokens: int


@dataclass(frozen=True)
class Explanation:
    """See the fields' types. `capacity_tokens`: tokens held at once in requests of
    `max_model_len`; `longest_request`: the longest the arena holds, up to `max_model_len`.
    `cached_turn_bytes`: what the prefix cache keeps per checkpoint besides its tokens' blocks."""

    model: str
    architecture: str
    dtype: str
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    prefix_caching: bool
    #: of one of so many ranks are the bytes, pages and requests
    tensor_parallel_size: int
    #: of all of so many stages together
    pipeline_parallel_size: int
    memory: Memory
    page_bytes: int
    num_pages: int
    groups: tuple[GroupReport, ...]
    requests: tuple[RequestCost, ...]
    uses: tuple[ByteUse, ...]
    capacity_tokens: int
    max_concurrency: float
    longest_request: int
    cached_turn_bytes: int
    tiers: tuple[TierReport, ...]
    decode: DecodeReport
    #: None for a single device
    layout: OwnLayout | None
    what_ifs: tuple[WhatIf, ...]
    decisions: tuple[decisions.Decision, ...]


@dataclass(frozen=True)
class _Plan:
    """A model's groups in an arena."""

    vllm_config: VllmConfig
    memory: Memory
    groups: list[KVCacheGroupSpec]
    arena: ArenaPlan

    def cost(self, num_tokens: int) -> RequestCost:
        batched = self.vllm_config.scheduler_config.max_num_batched_tokens
        memory = self.memory.arena_bytes
        return cost_of_request(self.groups, self.arena, batched, num_tokens, memory)


def explain(
    vllm_config: VllmConfig,
    budget: Budget | None = None,
    lengths: Sequence[int] | None = None,
    *,
    what_ifs: bool = True,
    decode_batch: DecodeBatch | None = None,
    link: LinkSpeed | None = None,
) -> Explanation:
    """Everything `vllm explain` shows; `lengths`: requests to cost, in tokens; `decode_batch`: the
    steps to predict; `link`: between devices, by default what theirs is known to be.

    Raises ValueError for a model without state, a length outside `1..max_model_len`, memory below
    one page, and a configured layout of several devices that an engine would refuse.
    """
    longest = vllm_config.model_config.max_model_len
    if lengths is None:
        lengths = [n for n in DEFAULT_LENGTHS if n < longest] or [longest]
    for length in lengths:
        if not 0 < length <= longest:
            raise ValueError(f"length {length} is outside 1..max_model_len ({longest})")
    budget, batch = budget or Budget(), decode_batch or DecodeBatch()
    plan = _plan(vllm_config, budget, vllm_config.parallel_config.tensor_parallel_size)
    model, arena = vllm_config.model_config, plan.arena
    tokens, concurrency = get_kv_cache_capacity(
        vllm_config, KVCacheConfig(arena.num_pages, [], plan.groups, arena)
    )
    costs = tuple(plan.cost(length) for length in lengths)
    specs = {name: g.kv_cache_spec for g in plan.groups for name in g.layer_names}
    return Explanation(
        model=model.model,
        architecture=model.architecture,
        dtype=dtype_name(model.dtype),
        block_size=vllm_config.cache_config.block_size,
        max_model_len=longest,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        pipeline_parallel_size=vllm_config.parallel_config.pipeline_parallel_size,
        memory=plan.memory,
        page_bytes=arena.page_bytes,
        num_pages=arena.num_pages,
        groups=tuple(_report(g, arena, i) for i, g in enumerate(plan.groups)),
        requests=costs,
        uses=tuple(
            use_of_bytes(plan.groups, arena, plan.memory.arena_bytes, cost) for cost in costs
        ),
        capacity_tokens=tokens,
        max_concurrency=concurrency,
        longest_request=estimate_max_model_len(
            vllm_config, specs, arena.num_pages * arena.page_bytes
        ),
        cached_turn_bytes=sum(
            arena.block_stride(i)
            for i, group in enumerate(plan.groups)
            if group.kv_cache_spec.is_recurrent
        ),
        tiers=_tiers(plan),
        decode=explain_decode(
            vllm_config, batch, lengths, plan.memory.arena_bytes, [one.sequences for one in costs]
        ),
        layout=explain_own_layout(
            vllm_config, budget, Rates(batch.device, link), batch.size, max(lengths)
        ),
        what_ifs=_what_ifs(plan, budget, lengths) if what_ifs else (),
        decisions=tuple(vllm_config.decisions.decisions()),
    )


# ---- the arena ---------------------------------------------------------------------------------


def _plan(vllm_config: VllmConfig, budget: Budget, tp_size: int) -> _Plan:
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return _staged_plan(vllm_config, budget, tp_size)
    own = outline_model(vllm_config, tp_size)
    outlines = [own, *other_outlines(vllm_config, tp_size, own)]
    groups = get_kv_cache_groups(vllm_config, dict(outlines[0].specs))
    if not groups:
        raise ValueError("the model keeps no state: there is nothing to plan")
    placed = [("", dict(outline.specs)) for outline in outlines]
    arena = placed_config(vllm_config, placed, num_pages=1).of_placement(0).plan
    outline = common_outline(vllm_config, outlines)
    memory = memory_of(vllm_config, budget, outline, arena.page_bytes)
    arena = replace(arena, num_pages=memory.arena_bytes // arena.page_bytes)
    if arena.num_pages < 1:
        raise ValueError(
            f"{memory.arena_bytes} bytes ({memory.source}) are less than one page of "
            f"{arena.page_bytes}"
        )
    return _Plan(vllm_config, memory, groups, arena)


def _staged_plan(vllm_config: VllmConfig, budget: Budget, tp_size: int) -> _Plan:
    """All stages together, as the scheduler sees them; ValueError if an engine would not start."""
    layout = replace(layout_of(vllm_config), tp=tp_size)
    plan = plan_layout(vllm_config, layout, budget)
    if plan.too_large:
        raise ValueError(plan.too_large)
    whole, memories = plan.whole, plan.memories
    if not whole.kv_cache_groups:
        raise ValueError("the model keeps no state: there is nothing to plan")
    memory = replace(
        memories[0],
        arena_bytes=sum(one.arena_bytes for one in memories),
        weight_bytes=sum(one.weight_bytes for one in memories),
        ring_bytes=sum(one.ring_bytes for one in memories),
    )
    if memory.device_bytes is not None:
        count = len(memories)
        device, reserved = memory.device_bytes * count, (memory.reserved_bytes or 0) * count
        memory = replace(memory, device_bytes=device, reserved_bytes=reserved)
    return _Plan(vllm_config, memory, whole.kv_cache_groups, whole.plan)


def _report(group: KVCacheGroupSpec, arena: ArenaPlan, group_id: int) -> GroupReport:
    spec, layers = group.kv_cache_spec, len(group.layer_names)
    data = spec.page_size_bytes * layers
    plan = arena.groups[group_id]
    report = GroupReport(
        kind=spec.label,
        keeps=spec.contents,
        layers=layers,
        data_bytes=data,
        stride_bytes=arena.block_stride(group_id),
        blocks_per_page=plan.blocks_per_page,
        padding=1.0 - data / arena.block_stride(group_id),
    )
    if spec.is_recurrent:
        return replace(report, bytes_per_sequence=data)
    size = spec.block_size
    return replace(report, tokens_per_block=size, bytes_per_token=data / size)


def _tiers(plan: _Plan) -> tuple[TierReport, ...]:
    """What the connector keeps behind the arena; ValueError where it cannot."""
    config, arena = plan.vllm_config, plan.arena
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return ()
    connector = KVConnectorFactory.get_connector_class(transfer)
    reports = []
    for tier in connector.state_tiers(transfer, arena, config.parallel_config.tensor_parallel_size):
        # An arena counts its null page, which a tier does not have.
        pages = replace(arena, num_pages=tier.num_pages + 1)
        tokens, _ = get_kv_cache_capacity(
            config, KVCacheConfig(pages.num_pages, [], plan.groups, pages)
        )
        num_bytes = tier.num_pages * arena.page_bytes
        reports.append(TierReport(tier.name, tier.num_pages, num_bytes, tokens))
    return tuple(reports)


# ---- changed flags -----------------------------------------------------------------------------


def _what_ifs(base: _Plan, budget: Budget, lengths: Sequence[int]) -> tuple[WhatIf, ...]:
    """One row per flag and value. Given device memory is divided anew, an arena stays as large."""
    config = base.vllm_config
    if budget.device_bytes is None:
        stages = config.parallel_config.pipeline_parallel_size
        budget = Budget(arena_bytes=base.memory.arena_bytes // stages)
    ranks = config.parallel_config.tensor_parallel_size
    rows = []
    for size in TP_SIZES:
        flag = f"--tensor-parallel-size {size}"
        rows.append(_what_if(base, flag, lambda: config, budget, size, lengths))
    for flag, field, values in _changes(base.groups):
        for value in values:
            changed = partial(with_changes, config, cache={field: value})
            rows.append(_what_if(base, f"{flag} {value}", changed, budget, ranks, lengths))
    return tuple(rows)


def _changes(groups: Sequence[KVCacheGroupSpec]) -> list[tuple[str, str, tuple[Any, ...]]]:
    """`(flag, field of the cache config, values)` that bear on these groups."""
    changes: list[tuple[str, str, tuple[Any, ...]]] = [("--block-size", "block_size", BLOCK_SIZES)]
    if any(group.kv_cache_spec.is_recurrent for group in groups):
        changes += [
            ("--mamba-ssm-cache-dtype", "mamba_ssm_cache_dtype", STATE_DTYPES),
            ("--mamba-cache-dtype", "mamba_cache_dtype", STATE_DTYPES),
        ]
    return [*changes, ("--kv-cache-dtype", "cache_dtype", CACHE_DTYPES)]


def _what_if(
    base: _Plan,
    flag: str,
    config: Callable[[], VllmConfig],
    budget: Budget,
    tp_size: int,
    lengths: Sequence[int],
) -> WhatIf:
    try:
        plan = _plan(config(), budget, tp_size)
    except ValueError as error:
        return WhatIf(flag, refused=str(error))
    costs = [plan.cost(length) for length in lengths]
    return WhatIf(
        flag,
        page_bytes=plan.arena.page_bytes,
        num_pages=plan.arena.num_pages,
        arena_bytes=plan.memory.arena_bytes,
        request_bytes=tuple(cost.num_bytes for cost in costs),
        sequences=tuple(cost.sequences for cost in costs),
        note="; ".join(_notes(base, plan, tp_size)),
    )


def _notes(base: _Plan, plan: _Plan, tp_size: int) -> list[str]:
    if plan.groups == base.groups:
        return ["as configured"]
    parallel = base.vllm_config.parallel_config
    if tp_size == parallel.tensor_parallel_size:
        return []
    notes = ["per device"]
    if _layer_bytes(plan) * tp_size > _layer_bytes(base) * parallel.tensor_parallel_size:
        notes.append("some state is replicated")
    return notes


def _layer_bytes(plan: _Plan) -> int:
    """Bytes of one block of every layer."""
    return sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in plan.groups)
