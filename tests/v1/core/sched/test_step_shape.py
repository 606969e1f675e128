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
WIDTHS = (1, 2, 4)


def output(
    requests: dict[str, tuple[int, int]],
    new: tuple[str, ...] = (),
    unsampled: tuple[str, ...] = (),
    drafts: tuple[str, ...] = (),
) -> SchedulerOutput:
    """Of requests with so many computed and scheduled tokens, of which some verify drafts."""
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
        {one: [-1] * (requests[one][1] - 1) for one in drafts},
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
    assert step.shape(WIDTHS) == expected
    batch = InputBatch(8, WIDTHS)
    for name, (computed, _) in requests.items():
        batch.add(name, [1] * 50, 50, SamplingParams(), computed)
    assert batch.order(step.num_scheduled_tokens, step.sampling_req_ids).shape == expected


def test_a_set_of_decodes_needs_no_look_at_its_requests() -> None:
    step = output({"a": (50, 1), "b": (70, 1)})
    step.scheduled_cached_reqs.num_computed_tokens = np.array([])  # type: ignore[assignment]
    step.decode_set_id = 3
    assert step.shape(WIDTHS) == StepShape(2, 2, 0, True)


@pytest.mark.parametrize(
    ("requests", "unsampled", "expected"),
    [
        ({"a": (50, 4), "b": (70, 4)}, (), StepShape(8, 2, 0, True, 4)),
        ({"a": (50, 2), "b": (70, 2)}, (), StepShape(4, 2, 0, True, 2)),
        # A decode without drafts, or with fewer, is padded to the others' width; a prefill is not.
        ({"a": (50, 3), "b": (70, 1)}, (), StepShape(8, 2, 0, True, 4)),
        ({"a": (50, 3), "b": (10, 40), "c": (30, 1)}, ("c",), StepShape(48, 3, 1, False, 4)),
        ({"a": (50, 2), "b": (10, 40), "c": (30, 1)}, ("c",), StepShape(44, 3, 1, False, 2)),
    ],
)
def test_drafts_widen_decodes(
    requests: dict[str, tuple[int, int]], unsampled: tuple[str, ...], expected: StepShape
) -> None:
    drafts = tuple(one for one, (computed, count) in requests.items() if 1 < count <= 4)
    step = output(requests, unsampled=unsampled, drafts=drafts)
    assert step.shape(WIDTHS) == expected
    batch = InputBatch(8, WIDTHS)
    for name, (computed, _) in requests.items():
        batch.add(name, [1] * 50, 50, SamplingParams(), computed)
    assert batch.order(step.num_scheduled_tokens, step.sampling_req_ids).shape == expected
    step.decode_set_id = 3
    # The core believes what the scheduler says of a set of decodes, whose counts are all the same.
    width = expected.width
    same = StepShape(width * len(requests), len(requests), 0, True, width)
    assert step.shape(WIDTHS) == same


def test_a_wider_step_has_more_tokens_of_decodes() -> None:
    narrow, wide = StepShape(50, 11, 1, False), StepShape(8, 2, 0, True, 4)
    assert narrow.widened(4) == StepShape(80, 11, 1, False, 4)
    both = StepShape.covering((narrow, wide))
    assert both == narrow.widened(4) and both.covers(narrow) and both.covers(wide)
    assert not narrow.covers(wide)


def test_the_least_shape_that_covers_all() -> None:
    decodes, prefills = StepShape(9, 9, 0, True), StepShape(40, 2, 2, False)
    both = StepShape.covering((decodes, prefills, NOTHING))
    assert both == StepShape(40, 9, 2, False)
    assert both.covers(decodes) and both.covers(prefills) and both.covers(NOTHING)
    assert decodes.covers(NOTHING) and not decodes.covers(prefills)
    assert not StepShape(40, 9, 0, True).covers(prefills)
