# SPDX-License-Identifier: Apache-2.0
"""What decode steps of a configuration should cost, by placement: part of `vllm explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.model_executor.decode_work import decode_work
from vllm.model_executor.model_outline import bytes_in_use, models_on_meta
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.model_executor.placements import Placement
from vllm.model_executor.state_layers import collect_layers, layer_specs
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.decode_cost import DEVICES, DecodeCost, DeviceSpeed, predict
from vllm.v1.core.explain_request import cost_of_request
from vllm.v1.core.state_groups import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class DecodeBatch:
    """Steps of `size` sequences on `device`."""

    size: int = 32
    device: DeviceSpeed = DEVICES["H200"]


@dataclass(frozen=True)
class PlacementDecode:
    """One placement, or a model that has none; `names`: what it is called. Per request length of
    the report: the `costs` of a step, how many such requests fit at once (`sequences`) where all
    have this placement, and all-attention's time over this one's (`speedups`; empty for a model
    that has no such placement). `weight_bytes`: of one rank's device, were this the only placement
    in use; None for a model that has none."""

    names: tuple[str, ...]
    costs: tuple[DecodeCost, ...]
    sequences: tuple[int, ...]
    speedups: tuple[float, ...] = ()
    weight_bytes: int | None = None


@dataclass(frozen=True)
class DecodeReport:
    """The engine's own placement comes first."""

    batch: DecodeBatch
    placements: tuple[PlacementDecode, ...]


def explain_decode(
    vllm_config: VllmConfig,
    batch: DecodeBatch,
    lengths: Sequence[int],
    arena_bytes: int,
    sequences: Sequence[int],
) -> DecodeReport:
    """The placements of a supernet are its own, those with an alias, and one for each mixer that
    all layers have; of a model that has none `sequences` fit, per length."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    config, models = models_on_meta(vllm_config, tp_size)
    model, rows = models[0], {}

    def costs() -> tuple[DecodeCost, ...]:
        work = decode_work(config, model)
        return tuple(predict(work, batch.device, batch.size, length) for length in lengths)

    def row(names: list[str], form: Placement) -> PlacementDecode:
        layers = collect_layers(config, *models)
        specs = layer_specs(config, layers)
        fitting = _fitting(config, specs, lengths, arena_bytes)
        weights = bytes_in_use(models, form)
        return PlacementDecode(tuple(names), costs(), fitting, weight_bytes=weights)

    if not isinstance(model, HasPlacements) or not model.get_mixer_names():
        return DecodeReport(batch, (PlacementDecode((), costs(), tuple(sequences)),))
    names: dict[str, list[str]] = {}
    forms: dict[str, Placement] = {}
    for name, form in _placements(config, model):
        spelled = model.spell(form)
        names.setdefault(spelled, []).append(name)
        forms.setdefault(spelled, form)
    for spelled, form in forms.items():
        model.set_layer_placements(form)
        rows[spelled] = row(names[spelled], form)
    base = next((one for one in rows.values() if "all-attention" in one.names), None)
    if base is None:
        return DecodeReport(batch, tuple(rows.values()))
    return DecodeReport(batch, tuple(_compared(one, base) for one in rows.values()))


def _placements(vllm_config: VllmConfig, model: HasPlacements) -> Iterator[tuple[str, Placement]]:
    chosen = model.get_layer_placements()
    config = vllm_config.model_config
    names = model.get_layer_mixers().values()
    layers = config.hf_text_config.num_hidden_layers
    yield "the engine's", [chosen.get(i, "") for i in range(layers)]
    yield from config.placement_aliases.items()
    for mixer in model.get_mixer_names():
        if all(mixer in known for known in names):
            yield f"all-{mixer}", [mixer] * layers


def _compared(one: PlacementDecode, base: PlacementDecode) -> PlacementDecode:
    pairs = zip(base.costs, one.costs, strict=True)
    return replace(one, speedups=tuple(slow.seconds / cost.seconds for slow, cost in pairs))


def _fitting(
    vllm_config: VllmConfig,
    specs: dict[str, KVCacheSpec],
    lengths: Sequence[int],
    arena_bytes: int,
) -> tuple[int, ...]:
    groups = get_kv_cache_groups(vllm_config, specs)
    arena = plan_arena(groups, num_pages=1)
    arena = replace(arena, num_pages=arena_bytes // arena.page_bytes)
    most = vllm_config.scheduler_config.max_num_batched_tokens
    if arena.num_pages < 1:
        return (0,) * len(lengths)
    costs = (cost_of_request(groups, arena, most, length, arena_bytes) for length in lengths)
    return tuple(cost.sequences for cost in costs)
