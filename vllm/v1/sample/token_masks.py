# SPDX-License-Identifier: Apache-2.0
"""Bars tokens row by row: one bit per token, unpacked on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.platforms import current_platform
from vllm.utils.torch_utils import to_device
from vllm.v1.structured_output.mask_words import WORD_BITS, FilledMasks, num_mask_words


@dataclass(frozen=True)
class TokenMasks:
    """`rows [n]` int64: rows of the logits; `words [n, ceil(vocab / 32)]` int32: bit t % 32 of
    word t // 32 allows token t. Both on the logits' device."""

    rows: Tensor
    words: Tensor

    @classmethod
    def upload(
        cls,
        masks: FilledMasks,
        firsts: np.ndarray,
        device: torch.device,
    ) -> TokenMasks:
        """`firsts [requests]` int64: the first row of the logits of each request, which those after
        its drafts follow."""
        words, counts = masks
        rows = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(len(words))
        return cls(
            to_device(torch.from_numpy(rows), device), to_device(torch.from_numpy(words), device)
        )

    @classmethod
    def dummy(cls, logits: Tensor, vocab_size: int) -> TokenMasks:
        """Masks of every row of `logits [n, ...]` that allow all (profiling, warm-up)."""
        num_rows = len(logits)
        shape = (num_rows, num_mask_words(vocab_size))
        words = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
        return cls(torch.arange(num_rows, device=logits.device), words)

    def apply(self, logits: Tensor, first: int = 0) -> None:
        """Set every barred token of `logits [rows, tokens]` to -inf, in place; they are those of
        the vocabulary from `first` on, which begins a word."""
        assert first % WORD_BITS == 0, "a rank's part of the vocabulary begins a word of the mask"
        words = self.words[:, first // WORD_BITS :]
        current_platform.kernels.mask_tokens(logits, self.rows, words)
