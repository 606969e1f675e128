# SPDX-License-Identifier: Apache-2.0
"""Settings of `mtp`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from typing_extensions import Self

from vllm.config.draft_methods.base import refuse
from vllm.config.draft_methods.draft_checkpoint import DraftCheckpointSettings, check_ranks
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig

#: `model_type` of the text config of targets whose head is known
_KNOWN = ("qwen3_5_text",)


@dataclass(frozen=True, kw_only=True)
class MtpSettings(DraftCheckpointSettings):
    """The target's own multi-token-prediction head, from the target's checkpoint.

    `model`: a speculators checkpoint of type mtp that has another head for the same target; absent
    or the target's own path for the head in the target's checkpoint.
    """

    method: ClassVar[str] = "mtp"
    reads_target: ClassVar[bool] = True
    num_ahead: ClassVar[int] = 1
    knows_num_tokens: ClassVar[bool] = True

    @property
    def lookahead_tokens(self) -> int:
        return self.num_drafts - 1

    def resolved(self, target: ModelConfig, parallel: ParallelConfig | None) -> Self:
        check_ranks(self.draft_tensor_parallel_size, parallel)
        text = target.hf_text_config
        if text.model_type not in _KNOWN:
            refuse(
                "method",
                f"mtp drafts with the head of {', '.join(_KNOWN)} models; this one is "
                f"{text.model_type}. Use eagle3, draft_model or ngram",
                self.method,
            )
        num_tokens = self.num_speculative_tokens
        if self.model is not None and Path(self.model).resolve() != Path(target.model).resolve():
            usual = self._tokens_of(self.model)
            return replace(self, num_speculative_tokens=num_tokens or usual)
        self._check_own_head(target)
        return replace(self, model=None, revision=None, num_speculative_tokens=num_tokens or 1)

    def _check_own_head(self, target: ModelConfig) -> None:
        if self.revision not in (None, target.revision):
            refuse(
                "revision",
                f"must be absent or --revision ({target.revision}) with the head in the target's "
                f"checkpoint, got {self.revision}",
                self.revision,
            )
        num_layers = getattr(target.hf_text_config, "mtp_num_hidden_layers", 0)
        if num_layers != 1:
            refuse(
                "method",
                f"mtp needs a checkpoint with a head of one layer; mtp_num_hidden_layers of "
                f"{target.model} is {num_layers}",
                self.method,
            )

    def _tokens_of(self, model: str) -> int:
        from vllm.transformers_utils.config import read_config_dict
        from vllm.transformers_utils.speculators import parse_speculators

        found = parse_speculators(model, read_config_dict(model, revision=self.revision))
        if found is None or found.method != self.method:
            refuse(
                "model",
                f"must be absent, the target's path or a speculators checkpoint of type mtp with "
                f"method mtp, got {model}",
                model,
            )
        if found.config.get("num_nextn_predict_layers", 1) != 1:
            refuse("model", "must have num_nextn_predict_layers 1 with method mtp", model)
        return found.num_speculative_tokens
