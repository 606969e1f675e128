# SPDX-License-Identifier: Apache-2.0
"""A step's adjustments: kernels against the row-by-row form, and rows that need nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.adjusted_rows import AdjustedRow, DeviceRows, HostRows, adjusted_rows
from vllm.v1.sample.adjustments import Adjustments

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 5000
PROMPT, OUTPUT = [1, 2, 5], [1, 2]
ONE_EACH = torch.ones(1, dtype=torch.int32, device=DEVICE)


def _params(*words: list[int], **kwargs: object) -> SamplingParams:
    params = SamplingParams(**kwargs)  # type: ignore[arg-type]
    params.bad_words_token_ids = list(words)
    return params


def _kinds() -> list[SamplingParams]:
    return [
        _params(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.3),
        _params(logit_bias={2: 5.0, 3: -1.0}, allowed_token_ids=[2, 4, 7]),
        _params(min_tokens=4, stop_token_ids=[3, 9]),
        _params([9], [1, 2, 3], [2, 4], [7] * 90, *[[30 + i] for i in range(40)]),
        _params([8, 8], presence_penalty=1.0, min_tokens=3, stop_token_ids=[8]),
    ]


def _rows(params: list[SamplingParams]) -> list[AdjustedRow]:
    tokens = np.array(PROMPT + OUTPUT, dtype=np.int64)
    places = (0, 5, 2, 3, 6)
    return [
        AdjustedRow(place, Adjustments(p, tokens, len(PROMPT), VOCAB, DEVICE), len(OUTPUT))
        for place, p in zip(places, params, strict=False)
    ]


def _at(rows: list[AdjustedRow], step: int) -> list[AdjustedRow]:
    return [row._replace(num_output_tokens=row.num_output_tokens + step) for row in rows]


def _positions(step: int = 0) -> Tensor:
    return torch.full((8,), len(PROMPT) + len(OUTPUT) + step, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_do_what_the_rows_do(dtype: torch.dtype) -> None:
    one, other = _rows(_kinds()), _rows(_kinds())
    for step, sampled in enumerate([[1, 8], [2, 8], [2, 8], [4, 1]]):
        logits = torch.randn(8, VOCAB).to(dtype).to(DEVICE)
        before = logits.clone()
        by_row, at_once = HostRows(_at(one, step)), DeviceRows.upload(_at(other, step), DEVICE)
        expected = by_row.change(logits, _positions(step), True)
        changed = at_once.change(logits, _positions(step), True)
        assert torch.equal(logits, before), "the raw logits are kept"
        torch.testing.assert_close(changed, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(changed[[1, 4, 7]], logits[[1, 4, 7]].float())
        tokens = torch.tensor([1, 0, 0, sampled[0], 0, 2, sampled[1], 0], device=DEVICE)
        by_row.observe(tokens, ONE_EACH)
        at_once.observe(tokens, ONE_EACH)
    for first, second in _pairs(one, other):
        assert (first.words is None) == (second.words is None)
        if first.words is not None and second.words is not None:
            assert torch.equal(first.words.recent, second.words.recent)
        assert first.marks is None or torch.equal(first.marks, second.marks)


def _pairs(
    one: list[AdjustedRow], other: list[AdjustedRow]
) -> list[tuple[Adjustments, Adjustments]]:
    return [(a.adjustments, b.adjustments) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("kernels", [False, True], ids=["rows", "kernels"])
def test_rows_after_drafts_are_those_of_decoding_token_by_token(
    accepted: int, kernels: bool
) -> None:
    """Each row counts the drafts before it; afterwards only the output is counted."""
    width, drafts = 4, torch.tensor([1, 2, 8], device=DEVICE)
    sampled = torch.tensor([1, 2, 8, 6], device=DEVICE)
    sampled[accepted] = 9
    logits = torch.randn(width, VOCAB, device=DEVICE)
    positions = len(PROMPT) + len(OUTPUT) + torch.arange(width, device=DEVICE)
    plain, drafted = _rows(_kinds()), _rows(_kinds())
    for first, second in _pairs(plain, drafted):
        rows = [AdjustedRow(j, second, len(OUTPUT), 0, j, drafts) for j in range(width)]
        at_once = DeviceRows.upload(rows, DEVICE) if kernels else HostRows(rows)
        changed = at_once.change(logits, positions, True)
        for j in range(accepted + 1):
            one = HostRows([AdjustedRow(j, first, len(OUTPUT))])
            expected = one.change(logits, positions, True)[j]
            torch.testing.assert_close(changed[j], expected, rtol=1e-6, atol=1e-6)
            one.observe(sampled, ONE_EACH)
        at_once.observe(sampled, ONE_EACH * (accepted + 1))
        assert first.marks is None or torch.equal(first.marks, second.marks)
        if first.words is not None and second.words is not None:
            assert torch.equal(first.words.recent, second.words.recent)


def _barred(logits: Tensor) -> list[int]:
    return torch.nonzero(logits == float("-inf")).flatten().tolist()


def test_bans_alone_keep_the_dtype_and_the_buffer() -> None:
    rows = _rows(_kinds())[2:4]
    logits = torch.zeros(8, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    changed = DeviceRows.upload(rows, DEVICE).change(logits, _positions(), False)
    assert changed is logits
    assert _barred(logits[2]) == [3, 9]
    assert _barred(logits[3]) == [3, 4, 9, *range(30, 70)]
    empty = torch.zeros_like(logits)
    copied = DeviceRows.upload(rows, DEVICE).change(empty, _positions(), True)
    assert copied.dtype == torch.bfloat16 and torch.equal(copied, logits)


def test_a_reached_minimum_length_needs_nothing() -> None:
    rows = _rows([_params(min_tokens=3, stop_token_ids=[3])])
    assert adjusted_rows(rows, torch.device("cpu")) is not None
    assert adjusted_rows(_at(rows, 1), torch.device("cpu")) is None
    assert adjusted_rows([], torch.device("cpu")) is None
    # Without a stop token there is nothing to bar either.
    assert adjusted_rows(_rows([_params(min_tokens=9)]), torch.device("cpu")) is None


def test_a_minimum_length_ends_on_the_device_too() -> None:
    rows = _rows([_params([7], min_tokens=3, stop_token_ids=[3])])
    logits = torch.zeros(2, 8, VOCAB, device=DEVICE)
    for step in range(2):
        DeviceRows.upload(_at(rows, step), DEVICE).change(logits[step], _positions(step), False)
    assert _barred(logits[0, 0]) == [3, 7] and _barred(logits[1, 0]) == [7]
