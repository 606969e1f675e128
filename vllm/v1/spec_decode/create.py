# SPDX-License-Identifier: Apache-2.0
"""The drafter of a configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm.config import VllmConfig
from vllm.config.draft_methods import DRAFT_METHODS
from vllm.kernels.step import Progress
from vllm.utils.class_registry import resolve_class
from vllm.v1.spec_decode.drafter import Drafter


def create_drafter(vllm_config: VllmConfig, progress: Progress) -> Drafter[Any] | None:
    """The configured drafter, without its model; None if there is none."""
    settings = vllm_config.drafter
    if settings is None:
        return None
    drafter_class: type[Drafter[Any]] = resolve_class(DRAFT_METHODS[settings.method].drafter)
    return drafter_class(vllm_config, settings, progress)


def attach_drafter(drafter: Drafter[Any], target: nn.Module) -> list[nn.Module]:
    """Build the drafter's model beside `target`: the modules in which there may be layers with
    state."""
    model = drafter.build_model(target)
    return [] if model is None else [model]
