# SPDX-License-Identifier: Apache-2.0
"""A step's arrays against a plain loop over requests and tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vllm.kernels.step import PagedGroups
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.input_batch import InputBatch, StepOrder
from vllm.v1.worker.staging import StagedArray
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def _batch(lengths: dict[str, tuple[int, int]]) -> InputBatch:
    """Requests by id: (known tokens, computed tokens); token i of a request is 100 * row + i."""
    batch = InputBatch(8)
    for req_id, (known, computed) in lengths.items():
        row_base = 100 * len(batch.requests)
        batch.add(req_id, [row_base + i for i in range(known)], known, GREEDY, computed)
    return batch


def prepared(builder: StepInputBuilder, order: StepOrder, *padding: int) -> StepInputs:
    """A step's inputs, of a model without paged layers."""
    inputs = builder.build(order, *padding)
    builder.prepare(order, inputs, PagedGroups.of([], CPU))
    return inputs


def test_decodes_come_first_and_a_first_token_is_a_prefill() -> None:
    batch = _batch({"a": (10, 0), "b": (10, 10), "c": (1, 0), "d": (9, 8)})
    order = batch.order({"a": 10, "b": 1, "c": 1, "d": 1}, {"a", "b", "d"})
    assert order.req_ids == ["b", "d", "a", "c"]
    assert order.num_decodes == 2
    assert order.sampling.tolist() == [0, 1, 2]


def test_a_piece_of_a_prompt_is_no_decode_only_step() -> None:
    """Its row may have to be scored, which a replayed graph does not do."""
    batch = _batch({"piece": (10, 4), "decode": (10, 10)})
    assert not batch.order({"piece": 1, "decode": 1}, {"decode"}).decode_only
    assert batch.order({"decode": 1}, {"decode"}).decode_only
    assert batch.order({"piece": 1, "decode": 1}, {"piece", "decode"}).decode_only


def test_arrays_of_a_mixed_step() -> None:
    batch = _batch({"new": (5, 0), "chunk": (40, 16), "decode": (7, 7)})
    order = batch.order({"new": 5, "chunk": 8, "decode": 1}, {"new", "decode"})
    builder = StepInputBuilder(8, 64, CPU, depth=2)
    progress, decode_row = builder.progress, batch.requests["decode"].row
    progress.tokens[decode_row, 0], progress.computed[decode_row] = 999, 7
    inputs = prepared(builder, order)
    assert inputs.num_tokens == 14
    assert inputs.input_ids.tolist() == [999, 0, 1, 2, 3, 4, *range(116, 124)]
    assert inputs.positions.tolist() == [7, 0, 1, 2, 3, 4, *range(16, 24)]
    assert inputs.query_start_loc.tolist() == [0, 1, 6, 14]
    assert inputs.prefill_query_start_loc.tolist() == [0, 5, 13]
    assert inputs.seq_lens.tolist() == [8, 5, 24]
    assert inputs.sample_indices.tolist() == [0, 5]
    assert inputs.next_positions[inputs.sample_indices].tolist() == [8, 5]
    rows = [batch.requests[r].row for r in ("decode", "new")]
    assert inputs.sample_requests.tolist() == [[rows[0], 0, 1, 0], [rows[1], 1, 1, 0]]
    assert progress.computed[[*rows, batch.requests["chunk"].row]].tolist() == [8, 5, 24]


def test_arrays_of_a_step_that_verifies_drafts() -> None:
    """Every decode has as many tokens as the step is wide; what does not count is not accepted."""
    batch = InputBatch(8, (1, 3))
    for name, known in (("one", 4), ("three", 6), ("new", 5)):
        batch.add(name, list(range(known)), known, GREEDY, 0 if name == "new" else known)
    order = batch.order({"new": 5, "one": 1, "three": 3}, {"new", "one", "three"})
    assert (order.width, order.num_decodes, order.lengths.tolist()) == (3, 2, [3, 3, 5])
    assert order.num_samples.tolist() == [3, 3, 1] and order.sample_starts.tolist() == [0, 3, 6]
    builder = StepInputBuilder(8, 64, CPU, depth=2, width=3)
    progress, rows = builder.progress, [batch.requests[r].row for r in ("one", "three", "new")]
    for row, computed in zip(rows, (9, 8), strict=False):
        progress.tokens[row] = torch.arange(3) + 100 * (row + 1)
        progress.computed[row], progress.num_drafts[row] = computed, 2
    inputs = prepared(builder, order)
    one, three = (100 * (row + 1) for row in rows[:2])
    assert inputs.input_ids.tolist() == [
        one,
        one + 1,
        one + 2,
        three,
        three + 1,
        three + 2,
        0,
        1,
        2,
        3,
        4,
    ]
    assert inputs.positions.tolist() == [9, 10, 11, 8, 9, 10, 0, 1, 2, 3, 4]
    assert inputs.seq_lens.tolist() == [12, 11, 5]
    assert inputs.sample_indices.tolist() == [0, 1, 2, 3, 4, 5, 10]
    sampled = torch.tensor([7, 8, 9, three + 1, 5, 6, 4])
    accepted = builder.accept_requests(inputs.sample_requests, sampled)
    assert accepted.tolist() == [[1, 2, 1], [0, 2, 0]]
    assert progress.tokens[rows, 0].tolist() == [7, 5, 4]
    assert progress.computed[rows].tolist() == [10, 10, 5]


@pytest.mark.parametrize(("count", "tokens", "accepted"), [(3, 3, 2), (2, 2, 1), (1, 1, 0)])
def test_a_draft_after_the_last_mask_is_not_accepted(
    count: int, tokens: int, accepted: int
) -> None:
    """Even if it was sampled; the token that follows the last draft with a mask counts."""
    batch = InputBatch(8, (1, 3))
    for name in ("free", "masked"):
        batch.add(name, [0, 1, 2], 3, GREEDY, 3)
    order = batch.order({"free": 3, "masked": 3}, {"free", "masked"})
    builder = StepInputBuilder(8, 64, CPU, depth=2, width=3)
    progress = builder.progress
    progress.tokens[:2] = torch.tensor([[4, 5, 6], [7, 8, 9]])
    progress.num_drafts[:2] = 2
    inputs = prepared(builder, order)
    places = order.places_of(["masked"])
    assert places.tolist() == [1] and order.places_of(["masked", "free"]).tolist() == [1, 0]
    builder.limit_samples(inputs.sample_requests, places, [count])
    counts = builder.accept_requests(inputs.sample_requests, torch.tensor([5, 6, 0, 8, 9, 3]))
    assert counts.tolist() == [[3, tokens], [2, accepted]]
    assert progress.tokens[:2, 0].tolist() == [0, [8, 9, 3][count - 1]]


@pytest.mark.parametrize(("padded", "rows"), [(None, 1), (6, 6), (16, 8)])
def test_rows_that_may_be_decodes(padded: int | None, rows: int) -> None:
    """Of a padded step as many as there are tokens or requests, whatever this one has."""
    batch = _batch({"new": (5, 0), "decode": (7, 7)})
    order = batch.order({"new": 5, "decode": 1}, {"new", "decode"})
    assert StepInputBuilder(8, 64, CPU, depth=2).build(order, padded).num_decode_rows == rows


def test_padding_follows_the_real_tokens() -> None:
    batch = _batch({"new": (5, 0), "decode": (7, 7)})
    builder = StepInputBuilder(8, 64, CPU, depth=1)
    for filled in (builder._ids.device, builder._positions, builder._seq_lens):
        filled[:] = 77
    builder.progress.tokens.zero_()
    builder.progress.computed[batch.requests["decode"].row] = 7
    order = batch.order({"new": 5, "decode": 1}, {"decode"})
    inputs = prepared(builder, order, 10)
    assert (inputs.num_tokens, inputs.num_padded) == (6, 10)
    assert inputs.input_ids.tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [7, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    # Requests are not padded: what reads them runs outside the graphs.
    assert inputs.seq_lens.tolist() == [8, 5] and inputs.query_start_loc.tolist() == [0, 1, 6]
    decode = batch.order({"decode": 1}, {"decode"})
    builder.progress.computed[batch.requests["decode"].row] = 7
    padded = prepared(builder, decode, 4, 4)
    assert padded.seq_lens.tolist() == [8, 0, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    batch = InputBatch(16)
    builder = StepInputBuilder(16, 512, CPU, depth=2)
    scheduled: dict[str, int] = {}
    for i in range(rng.randrange(1, 16)):
        known = rng.randrange(1, 40)
        computed = rng.randrange(0, known + 1)
        batch.add(str(i), [rng.randrange(1000) for _ in range(known)], known, GREEDY, computed)
        scheduled[str(i)] = 1 if computed == known else rng.randrange(1, known - computed + 1)
    newest = torch.randint(5000, 6000, (16,))
    builder.progress.tokens[:, 0] = newest
    builder.progress.computed[:] = torch.from_numpy(batch.num_computed)
    order = batch.order(scheduled, set(scheduled))
    inputs = prepared(builder, order)
    ids, positions = [], []
    for state in order.states:
        for j in range(scheduled[state.req_id]):
            position = state.num_computed_tokens + j
            positions.append(position)
            known = position < len(state.token_ids)
            ids.append(int(state.token_ids[position]) if known else int(newest[state.row]))
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions


def test_rows_are_reused_only_after_removal() -> None:
    batch = InputBatch(2)
    first = batch.add("a", [1], 1, GREEDY, 0).row
    second = batch.add("b", [1], 1, GREEDY, 0).row
    assert first != second
    with pytest.raises(RuntimeError, match="more than 2 requests"):
        batch.add("c", [1], 1, GREEDY, 0)
    batch.remove("a")
    assert batch.add("c", [1], 1, GREEDY, 0).row == first
    assert batch.remove("a") is None


def test_on_a_cpu_the_staged_array_is_the_devices() -> None:
    """A launched step has ended there: one array does."""
    staged = StagedArray((4,), torch.int64, CPU, depth=2)
    staged.next()[:] = 1
    assert staged.upload(4).tolist() == [1, 1, 1, 1]
    staged.next()[:] = 2
    assert staged.upload(2).tolist() == [2, 2]
    assert np.shares_memory(staged.array, staged.device.numpy())
