# SPDX-License-Identifier: Apache-2.0
"""A smaller copy of a model: every kind of its layers, its heads and its state, narrower between
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm.compilation.graph_safety.module_kinds import kind_of
from vllm.config import VllmConfig
from vllm.model_executor.model_outline import models_on_meta

#: sizes that no state has, and the most of them
_WIDTHS = {"vocab_size": 4096, "intermediate_size": 512, "moe_intermediate_size": 256}
#: of a model whose heads do not follow from it
_HIDDEN = 512


@dataclass(frozen=True)
class SmallerModel:
    """`overrides`: for `hf_overrides`; `summary`: what is smaller, in words."""

    overrides: dict[str, Any]
    summary: str


def smaller_model(config: VllmConfig) -> SmallerModel | None:
    """The first layers of a model up to the last new kind, a small vocabulary, narrow MLPs and
    residual stream; None for one that drafts, whose drafter is made for these sizes, and where
    nothing can be smaller."""
    assert config.model_config is not None
    if config.speculative_config is not None:
        return None
    overrides: dict[str, Any] = {}
    known = config.model_config.hf_text_config.to_dict()
    layers, needed = known.get("num_hidden_layers", 0), _layers_needed(config)
    if 0 < needed < layers:
        overrides["num_hidden_layers"] = needed
    widths = dict(_WIDTHS)
    if known.get("head_dim") and not any("expand" in name for name in known):
        widths["hidden_size"] = _HIDDEN
    for name, most in widths.items():
        if isinstance(known.get(name), int) and known[name] > most:
            overrides[name] = most
    if not overrides:
        return None
    parts = (f"{name} {value} of {known[name]}" for name, value in overrides.items())
    return SmallerModel(overrides, ", ".join(parts))


def _layers_needed(config: VllmConfig) -> int:
    """How many of the first decoder layers have all kinds; 0 without a list of layers."""
    _, (model, *_) = models_on_meta(config)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    kinds = [kind_of(layer) for layer in max(lists, key=len, default=[])]
    return max((kinds.index(kind) for kind in kinds), default=-1) + 1
