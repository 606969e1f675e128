# SPDX-License-Identifier: Apache-2.0
"""Logits that drafts are chosen from: the best token of each, whoever has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from torch import Tensor

from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SharesVocabulary
from vllm.v1.sample.vocab_shard import VocabShard

_WHAT, _WHY = "logits of drafts", "drafts are best tokens: ranks exchange theirs"


class MakesLogits(Protocol):
    """See `VllmModel`."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DraftLogits:
    """`compute`: `[n, hidden]` to this rank's rows of the head `[n, rows]`, those of padding, too;
    without a `shard` to the whole vocabulary, `[n, vocab]`."""

    compute: Callable[[Tensor], Tensor]
    shard: VocabShard | None

    @classmethod
    def of_model(cls, model: MakesLogits) -> DraftLogits:
        """Those of a draft model, or of the target that a head shares them with."""
        shard = VocabShard.of_model(model, _WHAT, _WHY)
        if shard is None:
            return cls(model.compute_logits, None)
        return cls(cast(SharesVocabulary, model).own_logits, shard)

    @classmethod
    def of_head(cls, head: VocabParallelEmbedding, processor: LogitsProcessor) -> DraftLogits:
        """Those of a drafter's own output head."""
        shard = VocabShard.of_head(head, _WHAT, _WHY)
        return cls(partial(processor if shard is None else processor.own, head), shard)

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to the logits of this rank's tokens, `[n, tokens]`."""
        logits = self.compute(hidden)
        return logits if self.shard is None else self.shard.own(logits)

    def best(self, logits: Tensor) -> Tensor:
        """The first of each row's largest of all ranks' `logits [n, tokens]`: `[n]` int64. Any
        token where there is none."""
        if self.shard is None:
            return logits.argmax(dim=-1)
        # A kernel that was only noted has left anything.
        return self.shard.best(logits).clamp(0, self.shard.vocab_size - 1)
