# SPDX-License-Identifier: Apache-2.0
"""A step's arrays against a plain loop over requests and tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.input_batch import InputBatch
from vllm.v1.worker.staging import StagedArray
from vllm.v1.worker.step_inputs import StepInputBuilder

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def _batch(lengths: dict[str, tuple[int, int]]) -> InputBatch:
    """Requests by id: (known tokens, computed tokens); token i of a request is 100 * row + i."""
    batch = InputBatch(8)
    for req_id, (known, computed) in lengths.items():
        row_base = 100 * len(batch.requests)
        batch.add(req_id, [row_base + i for i in range(known)], known, GREEDY, computed)
    return batch


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
    decode_row = batch.requests["decode"].row
    builder.remember(torch.tensor([decode_row]), torch.tensor([999]))
    inputs = builder.build(order)
    builder.read_newest(inputs)
    assert inputs.num_tokens == 14
    assert inputs.input_ids.tolist() == [999, 0, 1, 2, 3, 4, *range(116, 124)]
    assert inputs.positions.tolist() == [7, 0, 1, 2, 3, 4, *range(16, 24)]
    assert inputs.query_start_loc.tolist() == [0, 1, 6, 14]
    assert inputs.prefill_query_start_loc.tolist() == [0, 5, 13]
    assert inputs.seq_lens.tolist() == [8, 5, 24]
    assert inputs.sample_indices.tolist() == [0, 5]
    assert inputs.sample_positions.tolist() == [8, 5]
    rows = [batch.requests[r].row for r in ("decode", "new")]
    assert inputs.sample_rows.tolist() == rows
    assert (
        inputs.token_rows_cpu.tolist()
        == [rows[0]] + [rows[1]] * 5 + [batch.requests["chunk"].row] * 8
    )


@pytest.mark.parametrize(("padded", "rows"), [(None, 1), (6, 6), (16, 8)])
def test_rows_that_may_be_decodes(padded: int | None, rows: int) -> None:
    """Of a padded step as many as there are tokens or requests, whatever this one has."""
    batch = _batch({"new": (5, 0), "decode": (7, 7)})
    order = batch.order({"new": 5, "decode": 1}, {"new", "decode"})
    assert StepInputBuilder(8, 64, CPU, depth=2).build(order, padded).num_decode_rows == rows


def test_padding_follows_the_real_tokens() -> None:
    batch = _batch({"new": (5, 0), "decode": (7, 7)})
    builder = StepInputBuilder(8, 64, CPU, depth=1)
    for staged in (builder._ids, builder._positions, builder._seq_lens):
        staged.next()[:] = 77
    order = batch.order({"new": 5, "decode": 1}, {"decode"})
    inputs = builder.build(order, 10)
    builder.read_newest(inputs)
    assert (inputs.num_tokens, inputs.num_padded) == (6, 10)
    assert inputs.input_ids.tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [7, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    # Requests are not padded: what reads them runs outside the graphs.
    assert inputs.seq_lens.tolist() == [8, 5] and inputs.query_start_loc.tolist() == [0, 1, 6]
    decode = batch.order({"decode": 1}, {"decode"})
    padded = builder.build(decode, 4, 4)
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
    builder.last_sampled.copy_(newest)
    order = batch.order(scheduled, set(scheduled))
    inputs = builder.build(order)
    builder.read_newest(inputs)
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


def test_staged_arrays_keep_steps_in_flight_apart() -> None:
    staged = StagedArray((4,), torch.int64, CPU, depth=2)
    staged.next()[:] = 1
    first = staged.upload(4)
    staged.next()[:] = 2
    assert first.tolist() == [1, 1, 1, 1]
    assert staged.upload(2).tolist() == [2, 2]
    assert np.shares_memory(staged.array, staged.upload(4).numpy())
