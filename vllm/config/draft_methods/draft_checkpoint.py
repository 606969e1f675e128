# SPDX-License-Identifier: Apache-2.0
"""What settings of methods with a draft model check and make alike."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeGuard

from vllm.config.draft_methods.base import DraftSettings, refuse
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig

#: rotations for which a longer table of angles is all that longer sequences need
_ENDLESS_ROPES = ("default", "linear", "llama3", "proportional", "mrope")


@dataclass(frozen=True, kw_only=True)
class DraftCheckpointSettings(DraftSettings):
    """Of a drafter with a checkpoint of its own: `model`, a directory or hub name, at
    `revision`: a branch, tag or commit."""

    model: str | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int | None = None

    @property
    def checkpoint(self) -> str | None:
        return self.model

    @property
    def checkpoint_revision(self) -> str | None:
        return self.revision


def is_number(value: Any) -> TypeGuard[int]:
    """Whether a value of a checkpoint's config is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_ranks(asked: int | None, parallel: ParallelConfig | None) -> None:
    """A drafter is spread over the ranks of the target; `VLLMValidationError` for another wish."""
    ranks = 1 if parallel is None else parallel.tensor_parallel_size
    if asked not in (None, ranks):
        refuse(
            "draft_tensor_parallel_size",
            f"must be --tensor-parallel-size ({ranks}): the drafter runs on the target's ranks",
            asked,
        )


def draft_config(
    target: ModelConfig, model: str, revision: str | None, hf_config: Any
) -> ModelConfig:
    """The `ModelConfig` of the draft checkpoint `model` beside `target`: in its dtype, for
    sequences of its length; placements are the target's. `VLLMValidationError` if the positions of
    the draft end earlier."""
    draft = copy.copy(target)
    draft.model, draft.revision = model, revision
    draft.quantization = draft.placement = None
    draft.placement_alias = []
    draft.refresh_hf_config(hf_config)
    limit = draft.model_arch_config.max_model_len
    rope = getattr(draft.hf_text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if limit and limit < target.max_model_len and kind not in _ENDLESS_ROPES:
        refuse(
            "model",
            f"has positions for {limit} tokens (rope type {kind}), but the target serves "
            f"{target.max_model_len}; add --max-model-len {limit}",
            model,
        )
    return draft
