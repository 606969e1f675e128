# SPDX-License-Identifier: Apache-2.0
"""The sizes of a step, as the scheduler's output and the worker's order of it give them."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.input_batch import InputBatch

NOTHING = StepShape(0, 0, 0, True)


def output(
    requests: dict[str, tuple[int, int]], new: tuple[str, ...] = (), unsampled: tuple[str, ...] = ()
) -> SchedulerOutput:
    """Of requests with so many computed and scheduled tokens."""
    fresh = [
        NewRequestData(one, [1] * 50, [], SamplingParams(), None, ([],), requests[one][0])
        for one in new
    ]
    cached = [one for one in requests if one not in new]
    return SchedulerOutput(
        fresh,
        CachedRequestData(req_ids=cached, num_computed_tokens=[requests[one][0] for one in cached]),
        {one: count for one, (_, count) in requests.items()},
        sum(count for _, count in requests.values()),
        sampling_req_ids=set(requests) - set(unsampled),
    )


@pytest.mark.parametrize(
    ("requests", "new", "unsampled", "expected"),
    [
        ({}, (), (), NOTHING),
        ({"a": (50, 1), "b": (70, 1)}, (), (), StepShape(2, 2, 0, True)),
        # A one-token piece of a prompt runs as a decode does, but nobody samples after it.
        ({"a": (50, 1), "b": (20, 1)}, (), ("b",), StepShape(2, 2, 0, False)),
        ({"a": (50, 1), "b": (16, 34)}, (), (), StepShape(35, 2, 1, False)),
        # The first token of a prompt is a prefill; the last one after a cached prefix is not.
        ({"a": (0, 1)}, ("a",), ("a",), StepShape(1, 1, 1, False)),
        ({"a": (49, 1), "b": (0, 9)}, ("a", "b"), ("b",), StepShape(10, 2, 1, False)),
        ({"a": (49, 1)}, ("a",), (), StepShape(1, 1, 0, True)),
    ],
)
def test_the_core_and_the_worker_say_the_same(
    requests: dict[str, tuple[int, int]],
    new: tuple[str, ...],
    unsampled: tuple[str, ...],
    expected: StepShape,
) -> None:
    step = output(requests, new, unsampled)
    assert step.shape == expected
    batch = InputBatch(8)
    for name, (computed, _) in requests.items():
        batch.add(name, [1] * 50, 50, SamplingParams(), computed)
    assert batch.order(step.num_scheduled_tokens, step.sampling_req_ids).shape == expected


def test_a_set_of_decodes_needs_no_look_at_its_requests() -> None:
    step = output({"a": (50, 1), "b": (70, 1)})
    step.scheduled_cached_reqs.num_computed_tokens = np.array([])  # type: ignore[assignment]
    step.decode_set_id = 3
    assert step.shape == StepShape(2, 2, 0, True)


def test_the_least_shape_that_covers_all() -> None:
    decodes, prefills = StepShape(9, 9, 0, True), StepShape(40, 2, 2, False)
    both = StepShape.covering((decodes, prefills, NOTHING))
    assert both == StepShape(40, 9, 2, False)
    assert both.covers(decodes) and both.covers(prefills) and both.covers(NOTHING)
    assert decodes.covers(NOTHING) and not decodes.covers(prefills)
    assert not StepShape(40, 9, 0, True).covers(prefills)
