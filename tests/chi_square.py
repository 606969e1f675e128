# SPDX-License-Identifier: Apache-2.0
"""Whether tokens of a Markov chain have its law: Pearson's test of its transitions."""

from __future__ import annotations

import math

from torch import Tensor

#: standard deviations of the (nearly normal) transformed statistic
BOUND = 4.0


def deviation(logits: Tensor, table: Tensor) -> float:
    """Pearson's statistic of all rows of `table [vocab, vocab]`, how often each token followed each
    other, where `softmax(logits)` has the law; in standard deviations (Wilson and Hilferty, "The
    distribution of chi-square", 1931)."""
    expected = logits.double().softmax(-1) * table.sum(-1, keepdim=True)
    statistic = float(((table - expected) ** 2 / expected).sum())
    vocab = len(table)
    freedom = vocab * (vocab - 1)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
