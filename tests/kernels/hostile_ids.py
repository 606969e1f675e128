# SPDX-License-Identifier: Apache-2.0
"""Adjustments whose token ids were never checked, as if validation had a hole."""

from __future__ import annotations

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.adjustments import Adjustments

VOCAB = 5000
#: none is in the vocabulary; near ones would hit a neighbouring row, far ones no memory at all
NEAR = [-5, -1, VOCAB, VOCAB + 7, 2 * VOCAB - 1, -VOCAB]
FAR = [2**31, 2**40, -(2**40), 2**62, -(2**63)]
PROMPT, OUTPUT = [1, 2, 5], [1, 2]


def hostile(ids: list[int], device: torch.device) -> Adjustments:
    """Bars token 3 and, after `OUTPUT`, token 9; and `ids` in every way there is."""
    params = SamplingParams(
        max_tokens=90,
        min_tokens=50,
        stop_token_ids=[3],
        repetition_penalty=1.5,
        frequency_penalty=1.0,
    )
    params.bad_words_token_ids = [[1, 2, 9], *([2, 9] for _ in ids), *([9] for _ in ids)]
    tokens = np.array(PROMPT + OUTPUT, dtype=np.int64)
    made = Adjustments(params, tokens, len(PROMPT), VOCAB, device)
    assert made.words is not None
    made.stop_ids = torch.tensor([*ids, 3], dtype=torch.int64, device=device)
    ends = made.words.starts[1:] - 1
    for word, token in enumerate(ids + ids, start=1):
        made.words.ids[ends[word]] = token
    return made


def filtered(ids: list[int], device: torch.device) -> Adjustments:
    """The same through the constructor, which leaves ids outside the vocabulary out."""
    params = SamplingParams(max_tokens=90, min_tokens=50, stop_token_ids=[3])
    params.eos_token_ids = list(ids)
    params.bad_words_token_ids = [
        [1, 2, 9],
        *([2, token] for token in ids),
        [],
        *([t] for t in ids),
    ]
    params.logit_bias = {4: 2.0, **dict.fromkeys(ids, 1.0)}
    params.allowed_token_ids = [3, 4, 9, 11, *ids]
    tokens = np.array(PROMPT + OUTPUT, dtype=np.int64)
    return Adjustments(params, tokens, len(PROMPT), VOCAB, device)
