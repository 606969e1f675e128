# SPDX-License-Identifier: Apache-2.0
"""Settings of `draft_model`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

from typing_extensions import Self

from vllm.config.draft_methods.base import refuse
from vllm.config.draft_methods.draft_checkpoint import (
    DraftCheckpointSettings,
    check_ranks,
    draft_config,
)
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class DraftModelSettings(DraftCheckpointSettings):
    """A smaller model of the same vocabulary; `model` is its checkpoint."""

    method: ClassVar[str] = "draft_model"
    is_draft_model: ClassVar[bool] = True

    draft_sample_method: str = "greedy"
    #: its `ModelConfig`, once resolved
    draft: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            refuse("model", "must be given with method draft_model: the draft checkpoint", None)
        if self.draft_sample_method != "greedy":
            refuse(
                "draft_sample_method",
                f"must be greedy, got {self.draft_sample_method}: a draft is accepted if it is the "
                "token that the target samples, whatever it was drawn from",
                self.draft_sample_method,
            )

    @property
    def lookahead_tokens(self) -> int:
        return self.num_drafts

    @property
    def model_config(self) -> ModelConfig | None:
        return cast("ModelConfig | None", self.draft)

    def resolved(self, target: ModelConfig, parallel: ParallelConfig | None) -> Self:
        from vllm.transformers_utils.config import get_config

        assert self.model is not None
        check_ranks(self.draft_tensor_parallel_size, parallel)
        config = get_config(self.model, target.trust_remote_code, self.revision)
        draft = draft_config(target, self.model, self.revision, config)
        if draft.get_vocab_size() != target.get_vocab_size():
            self._refuse(
                f"has a vocabulary of {draft.get_vocab_size()}, the target one of "
                f"{target.get_vocab_size()}"
            )
        if getattr(draft.hf_config, "quantization_config", None):
            self._refuse("is quantised; use one in the target's dtype")
        settings = replace(self)
        object.__setattr__(settings, "draft", draft)
        return settings

    def _refuse(self, what: str) -> None:
        refuse("model", f": the draft model {self.model} {what}", self.model)
