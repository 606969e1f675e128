# SPDX-License-Identifier: Apache-2.0
"""Drafters that read the target's hidden states: a few layers of their own on top of it."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from vllm import decisions
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.draft_logits import DraftLogits, MakesLogits
from vllm.model_executor.models.interfaces import LoadsPart
from vllm.model_executor.models.weights import LM_HEAD, WeightsError
from vllm.model_executor.utils import set_weight_attrs


class DraftTarget(MakesLogits, Protocol):
    """What heads may share with the model they draft for: see `VllmModel`."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor: ...


class TargetReader(nn.Module, LoadsPart):
    """Subclasses are built from the head's own `VllmConfig` and the target, whose methods they may
    keep, but not the target itself: it is no part of the head.

    `prefix`: what the names of its layers begin with, and errors of its modules. `hidden_size`: of
    what `fuse` keeps; `aux_layer_ids`: the residual streams that it reads, ascending, as in
    `EagleModelMixin`; none: it reads the final hidden state. `logits`: of the draft vocabulary,
    from what the head returns, `[n, hidden_size]`.
    """

    prefix: ClassVar[str]
    hidden_size: int
    logits: DraftLogits
    aux_layer_ids: tuple[int, ...] = ()

    @abstractmethod
    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        """What the head keeps of the target's `hidden [tokens, hidden]`, after its final norm, and
        of its residual streams `aux`, each `[tokens, hidden]`: `[tokens, hidden_size]`."""

    def best_tokens(self, hidden_states: Tensor) -> Tensor:
        """The best draft after each of `hidden_states [n, hidden_size]`: `[n]` int64 ids of the
        target's vocabulary."""
        return self.target_ids(self.logits.best(self.logits(hidden_states)))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for `draft_ids`, of the same shape."""
        return draft_ids

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `VllmModel.load_weights`."""


class DraftHead(TargetReader):
    """A head that drafts token by token.

    Row `t` of a first pass pairs the target's hidden state at position `t` with the token at
    `t + 1` and predicts the token at `t + 2`. Later drafts go on from the head's own hidden state
    and draft.
    """

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`input_ids [tokens]` of the next tokens, `positions [tokens]` int64 of the hidden states
        `[tokens, hidden_size]`. Returns what `logits` takes and what the next draft's row starts
        from, both `[tokens, hidden_size]`."""

    @abstractmethod
    def keep(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> None:
        """Leave in the layers' state what `forward` leaves there, without what nothing but a draft
        needs: the last layer's attention and all that follows."""

    def mark_cache(self) -> None:
        """Say of every layer that its row of a token depends on the token after it."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.cache_lookahead = 1


class DraftVocabulary(TargetReader):
    """The output head of drafters in the speculators format, whose vocabulary may be a part of the
    target's: `d2t [draft vocab]` is the target's id less the draft's, `t2d [vocab]` which are kept.

    Call `init_vocabulary` when the module is built, and what loads it around the loading.
    """

    #: None once it is known that the target's is used
    lm_head: ParallelLMHead | None
    to_target: Tensor

    def init_vocabulary(
        self, size: int, vocab_size: int, hidden_size: int, target: DraftTarget
    ) -> None:
        """`size` of the target's `vocab_size` tokens; with all of them the checkpoint may have no
        output head."""
        self.vocab_size = vocab_size
        self._logits_of_target = partial(DraftLogits.of_model, target)
        self.lm_head = ParallelLMHead(size, hidden_size)
        if size == vocab_size:
            set_weight_attrs(self.lm_head.weight, {"optional": True})
        self.logits = DraftLogits.of_head(self.lm_head, LogitsProcessor(size))
        ids = torch.arange(size, dtype=torch.int64)
        self.register_buffer("to_target", ids, persistent=False)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.to_target[draft_ids]

    # ---- weights -------------------------------------------------------------------------------

    def head_not_read(self) -> dict[str, str]:
        """Names of the checkpoint that are not read again, with the reason."""
        return {LM_HEAD: "the target's output head is used"} if self.lm_head is None else {}

    @staticmethod
    def without_maps(
        weights: Iterable[tuple[str, Tensor]], maps: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The other tensors; `d2t` and `t2d` go into `maps`."""
        for name, tensor in weights:
            if name in ("d2t", "t2d"):
                maps[name] = tensor
            else:
                yield name, tensor

    def finish_vocabulary(self, maps: dict[str, Tensor], loaded: set[str]) -> None:
        """With the checkpoint's maps and the names that were `loaded`. WeightsError for maps that
        are absent or wrong."""
        self._take_maps(maps)
        if self.lm_head is not None and LM_HEAD not in loaded:
            self.lm_head, self.logits = None, self._logits_of_target()
            decisions.record("drafter's output head", "the target's", "the checkpoint has none")

    def _take_maps(self, maps: dict[str, Tensor]) -> None:
        size = len(self.to_target)
        if size == self.vocab_size:
            return
        if "d2t" not in maps:
            raise WeightsError([f"missing: d2t [{size}], the map to the target's vocabulary"])
        d2t = maps["d2t"].to(self.to_target)
        if d2t.shape != (size,):
            raise WeightsError([f"mis-shaped: d2t {list(d2t.shape)}, expected [{size}]"])
        ids = torch.arange(size, device=d2t.device) + d2t
        if bool(((ids < 0) | (ids >= self.vocab_size)).any()):
            raise WeightsError([f"d2t leads out of the target's {self.vocab_size} token ids"])
        if "t2d" in maps:
            kept = maps["t2d"].to(ids.device).nonzero().flatten()
            if not torch.equal(kept, ids.sort().values):
                raise WeightsError(["t2d and d2t name different tokens"])
        self.to_target.copy_(ids)
