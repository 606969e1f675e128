# SPDX-License-Identifier: Apache-2.0
"""A model without its weights: what its layers keep and how many bytes its parameters take."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.config.current import set_current_vllm_config, with_own_layers
from vllm.distributed.parallel_state import as_first_rank_of
from vllm.kernels.step import Progress
from vllm.model_executor.host_weights import parameter_bytes
from vllm.model_executor.layers.moe import check_expert_parallel
from vllm.model_executor.model_loader.base import initialize_model
from vllm.model_executor.models.interfaces import HasPlacements, as_stage
from vllm.model_executor.placements import Placement
from vllm.model_executor.state_layers import collect_layers, layer_specs
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.spec_decode.drafter import attach_drafter, create_drafter
from vllm.v1.spec_decode.extract_hidden_states import HiddenStateCapture
from vllm.v1.worker.journal_pool import JournalCounts, count_journals, journal_bytes
from vllm.v1.worker.residual_tap import ResidualTap, ask_for_captured_streams


@dataclass(frozen=True)
class ModelOutline:
    """Of one rank: `specs` by layer name, in layer order; bytes of the parameters and buffers that
    are on the device, and of those that wait in host memory (mixers of a supernet that no placement
    in use has); bytes of the journals of decode steps that write recurrent state seldom.
    `placement`: of a supernet, the mixers that it is of, joined by commas."""

    placement: str
    specs: dict[str, KVCacheSpec]
    weight_bytes: int
    host_bytes: int
    journals: JournalCounts
    ring_bytes: int


def outline_model(vllm_config: VllmConfig, tp_size: int = 1) -> ModelOutline:
    """Builds the model on the `meta` device, so that its layers themselves say what they keep.

    Takes no memory and reads no checkpoint; `vllm_config` and the engine that may run from it are
    left alone. Raises ValueError for what the layers refuse: an unknown architecture, a dtype no
    kernel reads, heads that `tp_size` does not divide.
    """
    return outline_of(*models_on_meta(vllm_config, tp_size))


def outline_of(config: VllmConfig, models: list[nn.Module]) -> ModelOutline:
    """Of what `models_on_meta` returns."""
    layers = collect_layers(config, *models)
    whole = _tensor_bytes(models)
    host_bytes = sum(parameter_bytes(_waiting(config, model)) for model in models)
    journals = count_journals(config, layers)
    return ModelOutline(
        placement=_own_placement(models[0]) or "",
        specs=layer_specs(config, layers),
        weight_bytes=whole - host_bytes,
        host_bytes=host_bytes,
        journals=journals,
        ring_bytes=journal_bytes(config, journals),
    )


def bytes_in_use(models: Sequence[nn.Module], placement: Placement) -> int:
    """Of the weights of what `models_on_meta` returns, on the device if this is the one placement
    in use of a supernet, the first of them."""
    model = models[0]
    assert isinstance(model, HasPlacements)
    unused = model.unused_mixers(placement)
    for beside in models[1:]:
        if isinstance(beside, HasPlacements):
            unused += beside.unused_mixers()
    return _tensor_bytes(models) - parameter_bytes(unused)


def _tensor_bytes(models: Sequence[nn.Module]) -> int:
    # Drafters may share modules with the target.
    tensors = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _own_placement(model: nn.Module) -> str | None:
    """None of a model that is no supernet."""
    if not isinstance(model, HasPlacements) or not model.get_mixer_names():
        return None
    return model.spell(model.get_layer_placements())


def _waiting(config: VllmConfig, model: nn.Module) -> list[nn.Module]:
    """The mixers that neither the model's own placement uses nor one with an alias."""
    own = _own_placement(model)
    if own is None or not isinstance(model, HasPlacements):
        return []
    return model.unused_mixers(own, *config.model_config.placement_aliases.values())


def common_outline(vllm_config: VllmConfig, outlines: Sequence[ModelOutline]) -> ModelOutline:
    """The first one, with the journals that all of them share."""
    journals = JournalCounts()
    for outline in outlines:
        journals |= outline.journals
    ring_bytes = journal_bytes(vllm_config, journals)
    return replace(outlines[0], journals=journals, ring_bytes=ring_bytes)


def other_outlines(vllm_config: VllmConfig, tp_size: int, own: ModelOutline) -> list[ModelOutline]:
    """Of a supernet's placements with an alias that keep something else than `own` and each
    other."""
    model, found = vllm_config.model_config, [own]
    for placement in model.placement_aliases.values():
        config = copy.copy(vllm_config)
        config.model_config = copy.copy(model)
        config.model_config.placement = placement
        outline = outline_model(config, tp_size)
        if all(outline.specs != known.specs for known in found):
            found.append(outline)
    return found[1:]


def models_on_meta(
    vllm_config: VllmConfig, tp_size: int = 1, stage: int | None = None
) -> tuple[VllmConfig, list[nn.Module]]:
    """The model and its drafters on the `meta` device, and the configuration that knows their
    layers; the whole model, or a pipeline stage of it, as the configuration divides it.

    Raises as `outline_model` does, and for what a worker refuses: experts that are to be spread
    where there are none, a model that cannot be a stage.
    """
    assert vllm_config.model_config is not None
    num_stages = 1 if stage is None else vllm_config.parallel_config.pipeline_parallel_size
    place = stage or 0
    parallel = vllm_config.parallel_config
    replicas = parallel.data_parallel_size if parallel.replicas_share_experts else 1
    is_last = place == num_stages - 1
    config = with_own_layers(vllm_config)
    meta = torch.device("meta")
    with (
        torch.no_grad(),
        set_default_torch_dtype(config.model_config.dtype),
        meta,
        as_first_rank_of(tp_size, place, num_stages, replicas),
        set_current_vllm_config(config),
    ):
        model = initialize_model(config)
        if num_stages > 1:
            as_stage(model)
        capture = HiddenStateCapture.create(config, meta) if is_last else None
        if not is_last:
            ask_for_captured_streams(config, model)
        drafters: list[nn.Module] = [] if capture is None else [capture.model]
        drafter = create_drafter(config, Progress.create(1, config.tokens_to_verify, meta))
        if drafter is not None:
            drafters += attach_drafter(drafter, model)
        check_expert_parallel(model, drafters, config.parallel_config, num_stages > 1)
        ResidualTap(model, [capture, drafter])
    return config, [model, *drafters]
