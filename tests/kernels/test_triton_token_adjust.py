# SPDX-License-Identifier: Apache-2.0
"""The adjustment kernels write into their own row and counts alone, whatever ids they are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.hostile_ids import NEAR, OUTPUT, PROMPT, VOCAB, filtered, hostile
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.adjusted_rows import AdjustedRow, DeviceRows, HostRows
from vllm.v1.sample.adjustments import Adjustments

NINF = float("-inf")


def barred(row: torch.Tensor) -> list[int]:
    return torch.nonzero(row == NINF).flatten().tolist()


def test_ids_outside_the_vocabulary_change_no_other_row(device):
    rows = DeviceRows.upload(
        [AdjustedRow(2, hostile(NEAR, torch.device(device)), 2)], torch.device(device)
    )
    logits = torch.zeros(5, VOCAB, device=device)
    rows = DeviceRows(rows.rows, rows.vocab_size, rows.descriptors, False, True, True)
    changed = rows.change(logits, torch.full((5,), 2, device=device), False)
    assert changed is logits
    assert barred(logits[2]) == [3, 9]
    assert not torch.isinf(logits[[0, 1, 3, 4]]).any(), "rows of other requests"


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 3, -VOCAB])
def test_a_token_outside_the_vocabulary_is_counted_nowhere(device, token):
    adjustments = hostile(NEAR, torch.device(device))
    assert adjustments.marks is not None and adjustments.words is not None
    guarded = torch.zeros(3 * VOCAB, dtype=torch.int32, device=device)
    guarded[VOCAB : 2 * VOCAB] = adjustments.marks
    adjustments.marks = guarded[VOCAB : 2 * VOCAB]
    before = guarded.clone()
    rows = DeviceRows.upload([AdjustedRow(1, adjustments, 2)], torch.device(device))
    once = torch.ones(1, dtype=torch.int32, device=device)
    rows.observe(torch.tensor([7, token, 8], device=device), once)
    assert torch.equal(guarded, before)
    assert adjustments.words.recent.tolist() == [OUTPUT[-1], token]
    rows.observe(torch.tensor([7, 4, 8], device=device), once)
    assert guarded.nonzero().flatten().tolist() == sorted({VOCAB + t for t in [*PROMPT, 4]})
    assert adjustments.words.recent.tolist() == [token, 4]


def test_unchecked_ids_are_left_out(device):
    rows = [AdjustedRow(1, filtered(NEAR, torch.device(device)), 2)]
    make = HostRows if device == "cpu" else lambda r: DeviceRows.upload(r, torch.device(device))
    positions = torch.full((3,), len(PROMPT) + 2, device=device)
    logits = make(rows).change(torch.zeros(3, VOCAB, device=device), positions, True)
    assert torch.nonzero(logits[1] > NINF).flatten().tolist() == [4, 11]
    assert logits[1, 4] == 2.0 and not logits[[0, 2]].any()


def test_words_of_any_lengths_cost_their_tokens(device):
    """Many short words and a long one: no padding to the longest. The interpreter gets fewer."""
    num_words, repeats = (2000, 5000) if device == "cuda" else (70, 40)
    params, long = SamplingParams(), [5, 6] * repeats
    params.bad_words_token_ids = [[100 + i, 4000 - i] for i in range(num_words)] + [[*long, 7]]
    tokens = np.array([1, *long, 150], dtype=np.int64)
    made = Adjustments(params, tokens, 1, VOCAB, torch.device(device))
    assert made.words is not None and len(made.words.ids) == 2 * num_words + len(long) + 1
    logits = torch.zeros(1, VOCAB, device=device)
    positions = torch.full((1,), len(tokens), device=device)
    rows = DeviceRows.upload([AdjustedRow(0, made, len(long) + 1)], torch.device(device))
    assert barred(rows.change(logits, positions, True)[0]) == [3950]
    resumed = Adjustments(params, tokens[:-1], 1, VOCAB, torch.device(device))
    rows = DeviceRows.upload([AdjustedRow(0, resumed, len(long))], torch.device(device))
    assert barred(rows.change(logits, positions, True)[0]) == [7]


@pytest.mark.parametrize("bounds", [(0, 1024), (1024, 1088), (4992, 5000)])
def test_a_part_of_the_vocabulary_changes_as_in_the_whole(device, bounds):
    """Penalties, biases, drafts, minimum length and words; nothing beside the part is touched."""
    first, last = bounds
    vocab, output = 5000, np.array([3, 1030, 4995, 1030])
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2, min_tokens=9,
        logit_bias={5: 2.0, 1040: -3.0, 4999: 4.0}, stop_token_ids=[7, 1050, 4994],
    )  # fmt: skip
    params.bad_words_token_ids = [[1030, 9], [1030, 1060], [1030, 4993], [8]]
    tokens = np.concatenate([np.array([1, 1025, 4996]), output])
    on = torch.device(device)
    made = Adjustments(params, tokens, 3, vocab, on)
    rows = DeviceRows.upload([AdjustedRow(1, made, len(output))], on)
    torch.manual_seed(0)
    logits = torch.randn(3, vocab).to(on)
    positions = torch.full((3,), len(tokens), device=on)
    whole = rows.change(logits, positions, True)
    assert sorted(barred(whole[1])) == [7, 8, 9, 1050, 1060, 4993, 4994]
    part = rows.change(logits[:, first:last], positions, True, first)
    assert torch.equal(part, whole[:, first:last])
