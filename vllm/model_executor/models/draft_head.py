# SPDX-License-Identifier: Apache-2.0
"""Drafters that read the target's hidden states: a few layers of their own on top of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import LoadsPart


class DraftTarget(Protocol):
    """What heads may share with the model they draft for: see `VllmModel`."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor: ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor: ...


class TargetReader(nn.Module, LoadsPart):
    """Subclasses are built from the head's own `VllmConfig` and the target, whose methods they may
    keep, but not the target itself: it is no part of the head.

    `hidden_size`: of what `fuse` keeps; `aux_layer_ids`: the residual streams that it reads,
    ascending, as in `EagleModelMixin`; none: it reads the final hidden state.
    """

    hidden_size: int
    aux_layer_ids: tuple[int, ...] = ()

    @abstractmethod
    def fuse(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        """What the head keeps of the target's `hidden [tokens, hidden]`, after its final norm, and
        of its residual streams `aux`, each `[tokens, hidden]`: `[tokens, hidden_size]`."""

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """`[n, hidden_size] -> [n, draft vocab]`."""

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
        `[tokens, hidden_size]`. Returns what `compute_logits` takes and what the next draft's row
        starts from, both `[tokens, hidden_size]`."""

    def mark_cache(self) -> None:
        """Say of every layer that its row of a token depends on the token after it."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.cache_lookahead = 1
