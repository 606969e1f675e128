# SPDX-License-Identifier: Apache-2.0
"""The constraint of one request: where its text stands in the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm.sampling_params import ReasoningBudget
from vllm.v1.engine import RequestConflict
from vllm.v1.structured_output.mask_words import WORD_BITS, num_mask_words, pack_tokens
from vllm.v1.structured_output.reasoning_limit import ReasoningLimit, TokenTexts
from vllm.v1.structured_output.vocabulary import Utf8Guard

if TYPE_CHECKING:
    import xgrammar


@dataclass(frozen=True)
class CompiledConstraint:
    """A grammar over the tokenizer's vocabulary, and what it leaves to `Utf8Guard` and to
    `ReasoningLimit`."""

    grammar: xgrammar.CompiledGrammar
    guard: Utf8Guard
    texts: TokenTexts


class RequestGrammar:
    """A function of the request's output tokens: it only ever sees those that count.

    `accept` follows each token the scheduler appends, `rewind` each one it takes back; a token
    dropped at a preemption is seen by neither. `fill` goes ahead along drafts: what the next tokens
    have in common with them is followed already, and the first that differs takes the rest back.
    `stop_token_ids` end the text where the grammar allows an end. Below `min_tokens` the tokens of
    `barred_below_min` are masked, unless the grammar leaves nothing else. `allowed [words]` int32:
    only these tokens, None for all. `reasoning` bounds what the grammar allows before the answer.
    """

    def __init__(
        self,
        compiled: Future[CompiledConstraint],
        vocab_size: int,
        stop_token_ids: list[int],
        min_tokens: int = 0,
        barred_below_min: list[int] | None = None,
        allowed: np.ndarray | None = None,
        reasoning: ReasoningBudget | None = None,
    ) -> None:
        self.num_words = num_mask_words(vocab_size)
        self._compiled = compiled
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._not_barred: np.ndarray | None = None
        if min_tokens:
            barred = [*stop_token_ids, *(barred_below_min or ())]
            self._not_barred = ~pack_tokens(barred, vocab_size)
        self._allowed = allowed
        self._reasoning = reasoning
        self._limit: ReasoningLimit | None = None
        self._matcher: xgrammar.GrammarMatcher | None = None
        #: the tokens that the matcher stands behind: after the first `_num_accepted`, drafts
        self._followed: list[int] = []
        self._num_accepted = 0
        #: whether nothing can come after `_followed`
        self._stuck = False

    @property
    def ready(self) -> bool:
        """Whether the compiler is done, with or without success."""
        return self._compiled.done()

    def compile_error(self) -> str | None:
        """Why there is no grammar; call when `ready`."""
        error = self._compiled.exception()
        if error is not None:
            return f"the grammar cannot be compiled: {error}"
        if self._reasoning is not None:
            texts, end = self._compiled.result().texts, self._reasoning.end
            if texts.spellings(end.encode())[0] is None:
                return f"the vocabulary has no tokens for {end!r}, which ends the reasoning"
        return None

    @property
    def terminated(self) -> bool:
        """Whether the text has ended: nothing can follow."""
        if self._matcher is None or self._num_accepted < len(self._followed):
            return False
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if the grammar does not allow it here."""
        num = self._num_accepted
        if num < len(self._followed) and self._followed[num] != token_id:
            self._go_back(num)
        if num == len(self._followed) and not self._follow(token_id):
            return False
        self._num_accepted += 1
        return True

    def error(self) -> RequestConflict:
        """What a refused token means for the request."""
        where = f"structured_outputs: after {self._num_accepted} tokens"
        if self._stuck:
            return RequestConflict(f"{where}, no token may follow in the grammar")
        return RequestConflict(
            f"{where}, none that the grammar allows was left to sample: bad_words bar them all"
        )

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` accepted tokens."""
        self._num_accepted = min(self._num_accepted, num_tokens)
        self._go_back(self._num_accepted)

    def fill(self, masks: np.ndarray, row: int, drafts: Sequence[int] = ()) -> int:
        """Write the tokens that may come next into `masks[row]` (`[rows, words]` int32), and those
        that may come after each of `drafts` into the rows that follow; returns the number of rows.

        They end before a draft that the mask before it bars, which cannot be sampled, and at one
        that ends the text. With no token left a row allows all, and `accept` refuses whatever comes
        there.
        """
        self._go_back(self._num_accepted)
        self._fill_next(masks, row)
        count = 1
        for draft in drafts:
            word, bit = divmod(draft, WORD_BITS)
            if not masks[row + count - 1, word] >> bit & 1 or not self._follow(draft):
                break
            if self._started().is_terminated():
                break
            self._fill_next(masks, row + count)
            count += 1
        return count

    def _fill_next(self, masks: np.ndarray, row: int) -> None:
        mask = masks[row]
        self._started().fill_next_token_bitmask(masks, row)
        if self._followed:
            self._compiled.result().guard.narrow(mask, self._followed[-1])
        if self._allowed is not None:
            mask &= self._allowed
        if self._not_barred is not None and len(self._followed) < self._min_tokens:
            longer = mask & self._not_barred
            if longer.any():
                mask[:] = longer
        if self._limit is not None:
            self._limit.narrow(mask, self._followed)
        self._stuck = not mask.any()
        if self._stuck:
            mask.fill(-1)

    def _follow(self, token_id: int) -> bool:
        if self._stuck or not self._started().accept_token(token_id):
            return False
        self._followed.append(token_id)
        return True

    def _go_back(self, num_tokens: int) -> None:
        surplus = len(self._followed) - num_tokens
        if surplus > 0:
            self._started().rollback(surplus)
            del self._followed[num_tokens:]
            self._stuck = False
            if self._limit is not None:
                self._limit.rewind(num_tokens)

    def _started(self) -> xgrammar.GrammarMatcher:
        if self._matcher is None:
            import xgrammar

            self._matcher = xgrammar.GrammarMatcher(
                self._compiled.result().grammar, override_stop_tokens=self._stop_token_ids
            )
            if self._reasoning is not None:
                self._limit = ReasoningLimit(self._reasoning, self._compiled.result().texts)
        return self._matcher
