# SPDX-License-Identifier: Apache-2.0
"""Banned words of one request: token sequences whose last token is barred after the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm.utils.torch_utils import to_device


class BannedWords:
    """Words of any lengths one after the other, and the newest output tokens beside them.

    `ids [total]` int64: the words' tokens; word w has those of `starts[w]` to `starts[w + 1]`
    (`starts [len + 1]` int64). `recent [longest - 1]` int64: the last output tokens, -1 before the
    first; all three on `device`. Words with a token outside `[0, vocab_size)` cannot come up and
    are left out.
    """

    def __init__(
        self,
        words: Sequence[Sequence[int]],
        output: np.ndarray,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        words = [word for word in words if word and 0 <= min(word) and max(word) < vocab_size]
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        self._host_ids = np.array([token for word in words for token in word], dtype=np.int64)
        self._host_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        longest = int(lengths.max(initial=1))
        recent = np.full(longest - 1, -1, dtype=np.int64)
        known = output[len(output) - min(len(recent), len(output)) :]
        recent[len(recent) - len(known) :] = known
        self.ids = to_device(torch.from_numpy(self._host_ids), device)
        self.starts = to_device(torch.from_numpy(self._host_starts), device)
        self.recent = to_device(torch.from_numpy(recent), device)

    def __len__(self) -> int:
        return len(self._host_starts) - 1

    def completing(self, drafts: Tensor) -> Tensor:
        """`[n]` int64: tokens that would complete a word after the `drafts [m]` (host only)."""
        ids, words, places, last = self._prefixes
        begun = torch.ones(len(self), dtype=torch.bool)
        begun[words[ids != self._recent_after(drafts)[places]]] = False
        return last[begun]

    def observe(self, tokens: Tensor) -> None:
        """Take note of the output `tokens [n]` int64 (host only)."""
        self.recent = self._recent_after(tokens)

    def _recent_after(self, tokens: Tensor) -> Tensor:
        return torch.cat([self.recent, tokens])[len(tokens) :] if len(tokens) else self.recent

    @cached_property
    def _prefixes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(ids, words, places, last)`: of every token but the words' last ones its id, its word
        and its place in `recent`; and the last ones, one per word."""
        ends = self._host_starts[1:] - 1
        word = np.repeat(np.arange(len(self)), np.diff(self._host_starts))
        before = ends[word] - np.arange(len(word))
        prefix = before > 0
        arrays = (
            self._host_ids[prefix],
            word[prefix],
            len(self.recent) - before[prefix],
            self._host_ids[ends],
        )
        ids, words, places, last = (torch.from_numpy(array) for array in arrays)
        return ids, words, places, last
