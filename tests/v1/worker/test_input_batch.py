# SPDX-License-Identifier: Apache-2.0
"""Rows, counts and orders of a worker's requests."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.input_batch import InputBatch, StepOrder

GREEDY = SamplingParams(temperature=0.0)


def _batch(*names: str) -> InputBatch:
    batch = InputBatch(8)
    for name in names:
        batch.add(name, [1, 2, 3], 3, GREEDY, 3)
    return batch


def _same(one: StepOrder, other: StepOrder) -> bool:
    """Equal, arrays element by element."""
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(StepOrder)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _decode(batch: InputBatch, names: str, set_id: int) -> StepOrder:
    return batch.order(dict.fromkeys(names, 1), set(names), set_id)


def test_a_set_of_decodes_is_ordered_once() -> None:
    batch = _batch("a", "b", "c")
    first = _decode(batch, "cab", 5)
    batch.advance(first)
    second = _decode(batch, "cab", 5)
    assert second.rows is first.rows and second.sampled is first.sampled
    assert first.num_computed.tolist() == [3, 3, 3] and second.num_computed.tolist() == [4, 4, 4]
    assert _same(second, _decode(batch, "cab", 0))


def test_another_set_is_ordered_anew() -> None:
    batch = _batch("a", "b", "c")
    _decode(batch, "cab", 5)
    assert _decode(batch, "ab", 6).req_ids == ["a", "b"]
    mixed = batch.order({"a": 1, "b": 1, "c": 2}, {"a", "b"})
    assert mixed.num_decodes == 2
    assert _decode(batch, "abc", 6).req_ids == ["a", "b", "c"]


def test_sets_that_take_turns_are_ordered_once() -> None:
    batch = InputBatch(4, num_sets=2)
    for req_id in "abc":
        batch.add(req_id, [1, 2, 3], 3, GREEDY, 2)
    first, second = _decode(batch, "ab", 5), _decode(batch, "c", 6)
    for _ in range(2):
        assert _decode(batch, "ab", 5).states is first.states
        assert _decode(batch, "c", 6).states is second.states
    batch.remove("c")
    assert _decode(batch, "ab", 5).states is not first.states


def test_a_request_that_comes_back_has_another_row() -> None:
    batch = _batch("a", "b")
    before = _decode(batch, "ab", 5)
    batch.remove("a")
    batch.add("x", [1], 1, GREEDY, 1)
    batch.add("a", [1, 2, 3, 4], 3, GREEDY, 2)
    after = _decode(batch, "ab", 5)
    assert after.rows.tolist() != before.rows.tolist()
    assert after.rows[0] == batch.requests["a"].row
    assert (after.num_computed[0], after.num_known[0]) == (2, 4)


def test_counts_follow_the_steps() -> None:
    batch = _batch("a")
    batch.add("new", [1, 2, 3, 4, 5], 4, GREEDY, 0)
    state = batch.requests["new"]
    assert (state.num_computed_tokens, state.num_output_tokens) == (0, 1)
    batch.advance(batch.order({"new": 3, "a": 1}, {"a"}))
    assert (state.num_computed_tokens, state.num_output_tokens) == (3, 1)
    batch.advance(batch.order({"new": 2, "a": 1}, {"a", "new"}))
    assert (state.num_computed_tokens, state.num_output_tokens) == (5, 2)
    assert batch.requests["a"].num_output_tokens == 2


def test_counts_of_the_host_by_row() -> None:
    """As one by one: of a set of decodes, of one that has changed, of a request without a row."""
    batch = _batch("a", "b", "c")
    order = _decode(batch, "cab", 5)
    for names, set_id in (("cab", 5), ("cab", 0), ("bca", 5), ("bxa", 6)):
        batch.num_computed[:] = 0
        batch.set_computed(list(names), [7, 8, 9], set_id)
        expected = {name: n for name, n in zip(names, [7, 8, 9], strict=True) if name in "abc"}
        found = {name: state.num_computed_tokens for name, state in batch.requests.items()}
        assert found == dict.fromkeys("abc", 0) | expected
    assert _decode(batch, "cab", 5).rows is order.rows
