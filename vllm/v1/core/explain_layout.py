# SPDX-License-Identifier: Apache-2.0
"""What each rank of a layout holds, sends and needs for a step: part of `vllm explain`.

The predictions are `layout_cost`'s, of what `layout_plan` says a start would make.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tqdm import tqdm

from vllm.config import VllmConfig
from vllm.decisions import Decision
from vllm.model_executor.layers.moe import has_mixtures
from vllm.model_executor.model_outline import models_on_meta
from vllm.utils.torch_utils import dtype_name
from vllm.v1.core.decode_cost import DEVICES, DeviceSpeed
from vllm.v1.core.layout_cost import (
    Layout,
    StepCost,
    Traffic,
    layouts_of,
    predict_layout,
    stage_seconds,
    traffic_of,
)
from vllm.v1.core.layout_plan import Budget, Memory, PlannedStage, plan_layout
from vllm.v1.core.link_speed import LinkSpeed, link_of
from vllm.v1.core.prefill_cost import PrefillCost, predict_prefill


@dataclass(frozen=True)
class Rates:
    """Speeds of the prediction; `link` None: that of the device, where it is known."""

    device: DeviceSpeed = DEVICES["H200"]
    link: LinkSpeed | None = None

    def link_for(self, layout: Layout, vllm_config: VllmConfig) -> LinkSpeed | None:
        """None for ranks that exchange nothing; ValueError if it is not known."""
        if not layout.exchanges:
            return None
        link = self.link or link_of(self.device.name)
        parallel = vllm_config.parallel_config
        if parallel.disable_custom_all_reduce or parallel.nnodes > 1:
            link = replace(link, peer_sums=False)
        return link


@dataclass(frozen=True)
class StageReport:
    """One rank of a stage, in bytes: `weight_bytes`, `arena_bytes` for state, uncommitted tokens
    (`ring_bytes`), and what it sends in a step of `step_tokens` requests, which takes `seconds`
    (with `exchange_seconds`)."""

    layers: int
    weight_bytes: int
    arena_bytes: int
    ring_bytes: int
    reserved_bytes: int
    step_tokens: int
    traffic: Traffic
    seconds: float
    exchange_seconds: float

    @property
    def rank_bytes(self) -> int:
        """All of it; the arena takes what there is."""
        return self.weight_bytes + self.arena_bytes + self.ring_bytes + self.reserved_bytes


@dataclass(frozen=True)
class LayoutReport:
    """A layout with `context` tokens per request. `refused`: why the model, or an engine's
    configuration, cannot take it; `too_large`: why it does not fit its devices. Without either:
    `one` request, the `asked` batch per replica, and as many as run at once per replica, `full`;
    `sequences` fit in the state memory; `prefill` of full steps."""

    layout: Layout
    context: int
    memory_source: str = ""
    refused: str = ""
    too_large: str = ""
    stages: tuple[StageReport, ...] = ()
    sequences: int = 0
    one: StepCost | None = None
    asked: StepCost | None = None
    full: StepCost | None = None
    prefill: PrefillCost | None = None

    @property
    def is_possible(self) -> bool:
        return not self.refused and not self.too_large


@dataclass(frozen=True)
class OwnLayout:
    """The configured layout; `link` None: nothing is exchanged."""

    device: DeviceSpeed
    link: LinkSpeed | None
    report: LayoutReport


@dataclass(frozen=True)
class LayoutComparison:
    """All layouts of a model on so many `devices`, in steps of `batch` requests per replica of
    `context` tokens, and of as many as run at once; places of the best ones in `candidates`, None
    where none is possible. `link` None: no layout exchanges anything."""

    model: str
    architecture: str
    dtype: str
    devices: int
    device: DeviceSpeed
    link: LinkSpeed | None
    batch: int
    context: int
    candidates: tuple[LayoutReport, ...]
    lowest_latency: int | None
    highest_throughput: int | None
    decisions: tuple[Decision, ...]


def explain_own_layout(
    vllm_config: VllmConfig, budget: Budget, rates: Rates, batch: int, context: int
) -> OwnLayout | None:
    """The configured layout if it has several devices. ValueError if it is refused, and for rates
    that are not known."""
    layout = layout_of(vllm_config)
    if layout.devices == 1:
        return None
    report = explain_layout(vllm_config, layout, budget, rates, batch, context)
    if report.refused:
        raise ValueError(f"{layout.name}: {report.refused}")
    return OwnLayout(rates.device, rates.link_for(layout, vllm_config), report)


def compare_layouts(
    vllm_config: VllmConfig,
    devices: int,
    budget: Budget,
    rates: Rates,
    batch: int,
    context: int | None = None,
) -> LayoutComparison:
    """All layouts of `devices` devices; `context`: tokens per request, `max_model_len` by default.

    Raises ValueError for fewer than one device or token, more tokens than `max_model_len`, a
    configuration with sizes of its own, and rates that are not known.
    """
    model = vllm_config.model_config
    context = model.max_model_len if context is None else context
    if devices < 1:
        raise ValueError(f"--devices {devices}: at least 1")
    if not 0 < context <= model.max_model_len:
        raise ValueError(f"length {context} is outside 1..max_model_len ({model.max_model_len})")
    if layout_of(vllm_config).devices > 1:
        raise ValueError(
            "--devices compares all sizes; leave out --tensor-parallel-size, "
            "--pipeline-parallel-size and --data-parallel-size"
        )
    candidates = list(layouts_of(devices, _expert_parallel(vllm_config)))
    links = [rates.link_for(one, vllm_config) for one in candidates]
    bar = tqdm(candidates, desc="Layouts", unit="layout", dynamic_ncols=True, leave=False)
    found = [explain_layout(vllm_config, one, budget, rates, batch, context) for one in bar]
    latency = {i: one.one.seconds for i, one in enumerate(found) if one.one}
    throughput = {i: one.full.tokens_per_s for i, one in enumerate(found) if one.full}
    return LayoutComparison(
        model=model.model,
        architecture=model.architecture,
        dtype=dtype_name(model.dtype),
        devices=devices,
        device=rates.device,
        link=next((link for link in links if link is not None), None),
        batch=batch,
        context=context,
        candidates=tuple(found),
        # Of equal ones the first, with the fewest ranks that wait for each other.
        lowest_latency=min(latency, key=latency.__getitem__, default=None),
        highest_throughput=max(throughput, key=throughput.__getitem__, default=None),
        decisions=tuple(vllm_config.decisions.decisions()),
    )


def layout_of(vllm_config: VllmConfig) -> Layout:
    """The configured one."""
    parallel = vllm_config.parallel_config
    return Layout(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
        parallel.enable_expert_parallel,
    )


def _expert_parallel(vllm_config: VllmConfig) -> tuple[bool, ...]:
    """What layouts are tried with: as configured, or both where the model has experts."""
    if vllm_config.parallel_config.enable_expert_parallel:
        return (True,)
    _, (model, *_) = models_on_meta(vllm_config)
    return (False, True) if has_mixtures(model) else (False,)


def explain_layout(
    vllm_config: VllmConfig,
    layout: Layout,
    budget: Budget,
    rates: Rates,
    batch: int,
    context: int,
    prompt: int | None = None,
) -> LayoutReport:
    """Everything about one layout; `prompt`: tokens of prompts, `context` by default. ValueError
    for rates that are not known."""
    link = rates.link_for(layout, vllm_config)
    report = LayoutReport(layout, context)
    try:
        plan = plan_layout(vllm_config, layout, budget)
    except ValueError as error:
        return replace(report, refused=str(error))
    report = replace(
        report,
        memory_source=plan.memories[0].source,
        stages=tuple(
            _stage_report(stage, memory, layout, rates.device, link, batch, context)
            for stage, memory in zip(plan.stages, plan.memories, strict=True)
        ),
        too_large=plan.too_large,
    )
    if plan.too_large:
        return report
    sequences = plan.sequences(context)
    report = replace(report, sequences=sequences)
    most = min(sequences, plan.config.scheduler_config.max_num_seqs)
    if not most:
        why = f"not one request of {context:,} tokens fits in the state memory"
        return replace(report, too_large=why)
    works = [stage.work for stage in plan.stages]
    one, asked, full = (
        predict_layout(works, layout, rates.device, link, size, context)
        for size in (1, batch, most)
    )
    step_tokens = plan.config.scheduler_config.max_num_batched_tokens
    prefill = predict_prefill(works, layout, rates.device, link, step_tokens, prompt or context)
    return replace(report, one=one, asked=asked, full=full, prefill=prefill)


def _stage_report(
    stage: PlannedStage,
    memory: Memory,
    layout: Layout,
    device: DeviceSpeed,
    link: LinkSpeed | None,
    batch: int,
    context: int,
) -> StageReport:
    """With all memory that is there for the arena."""
    tokens = -(-batch // min(batch, layout.pp))
    computing, exchanges = stage_seconds(stage.work, layout, device, link, tokens, context)
    return StageReport(
        layers=stage.layers,
        weight_bytes=memory.weight_bytes,
        arena_bytes=memory.arena_bytes,
        ring_bytes=stage.outline.ring_bytes,
        reserved_bytes=memory.reserved_bytes or 0,
        step_tokens=tokens,
        traffic=traffic_of(stage.work, layout, tokens),
        seconds=computing + exchanges,
        exchange_seconds=exchanges,
    )
