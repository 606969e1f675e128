# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the vocabulary, and what ranks tell each other about theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm import decisions
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SharesVocabulary
from vllm.platforms import current_platform

_KEPT, _GATHERED = "each rank keeps its own", "gathered whole"


@dataclass(frozen=True)
class VocabShard:
    """Of a vocabulary of `vocab_size` tokens, rank r of `group` has the logits of tokens
    `r * width` to `(r + 1) * width`, as far as there are such tokens."""

    vocab_size: int
    width: int
    group: GroupCoordinator

    @classmethod
    def of_head(cls, head: VocabParallelEmbedding, what: str, why: str) -> VocabShard | None:
        """The part that `head` makes logits of; None where it is the whole. That ranks keep their
        parts is the decision `what`, for the reason `why`."""
        if head.tp_size == 1:
            return None
        decisions.record(what, _KEPT, why, _GATHERED)
        return cls(head.num_embeddings, head.num_embeddings_per_partition, get_tp_group())

    @classmethod
    def of_model(cls, model: object, what: str, why: str) -> VocabShard | None:
        """That of a model's head; None for a model that gathers its logits itself: that is the
        decision then."""
        if isinstance(model, SharesVocabulary):
            return cls.of_head(model.output_head, what, why)
        if get_tp_group().world_size > 1:
            own = f"{type(model).__name__} does not leave them with the ranks (SharesVocabulary)"
            decisions.record(what, _GATHERED, own, _KEPT)
        return None

    @property
    def first(self) -> int:
        """This rank's first token; without any, the vocabulary's last."""
        return min(self.group.rank_in_group * self.width, self.vocab_size - 1)

    @property
    def size(self) -> int:
        """Tokens of this rank; the last ranks may have none."""
        return max(0, min(self.width, self.vocab_size - self.group.rank_in_group * self.width))

    def own(self, logits: Tensor) -> Tensor:
        """`logits [n, width]` without padding, `[n, size]`; a rank without tokens has a column of
        -inf, so that nothing has to ask."""
        if self.size:
            return logits[:, : self.size]
        return logits.new_full((len(logits), 1), -torch.inf)

    def whole(self, own: Tensor) -> Tensor:
        """`own [n, size]` of all ranks as fp32 `[n, vocab_size]`."""
        padded = own.new_full((len(own), self.width), -torch.inf, dtype=torch.float32)
        padded[:, : own.shape[1]] = own
        return self.group.all_gather(padded, dim=1)[:, : self.vocab_size]

    def of_ranks(self, x: Tensor) -> Tensor:
        """`x [...]` of each rank: `[ranks, ...]`."""
        return self.group.all_gather(x.unsqueeze(0), dim=0)

    def best(self, own: Tensor) -> Tensor:
        """The token of the first of each row's largest logits, of which each rank has `own [n,
        size]`: `argmax_rows` of the whole rows, `[n]` int64."""
        return self.first_best(current_platform.kernels.best_rows(own, self.first, self.vocab_size))

    def first_best(self, told: Tensor) -> Tensor:
        """The best token of each row, `[n]` int64, of what each rank's `best_rows` or `best_draws`
        has told of its own."""
        return current_platform.kernels.first_best(self.of_ranks(told), self.vocab_size)

    def total(self, x: Tensor) -> Tensor:
        """The sum of small integers `x [...]` over the ranks."""
        return self.of_ranks(x).sum(dim=0)

    def candidates(self, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest of each rank's `own [n, size]` fp32, and their tokens, int64:
        `[n, ranks * count]` in descending order, equal ones by token; -inf where there is none."""
        found, places = own.topk(min(count, own.shape[1]), dim=1)
        missing = count - found.shape[1]
        values = torch.nn.functional.pad(found, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(places + self.first, (0, missing), value=self.vocab_size)
        told = self.of_ranks(torch.stack([values.double(), ids.double()]))
        values, ids = told.permute(1, 2, 0, 3).flatten(2).unbind(0)
        by_token = ids.argsort(dim=1)
        values, ids = values.gather(1, by_token), ids.gather(1, by_token)
        values, order = values.sort(dim=1, descending=True, stable=True)
        return values.float(), ids.gather(1, order).long()
