# SPDX-License-Identifier: Apache-2.0
"""The token masks of a step: a message of their own, which follows the step's.

A step is launched first. The core fills its masks while the device runs the forward pass, as soon
as every token sampled before the step is known, and with them the drafts that the step verifies;
the worker takes them between the forward pass and the sampler, and waits for them there, on the
host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue

import numpy as np

from vllm.v1.request import Request
from vllm.v1.structured_output.mask_words import FilledMasks

_ALL = -1

#: Waits for the masks of the next step that has any, of its `masked_req_ids` in that order.
#: `CancelledError` if the step is given up.
ReceiveMasks = Callable[[], FilledMasks]


class StepMasks:
    """The core's side: the constrained requests that sample in a step, and how many drafts of each
    the step verifies at most."""

    def __init__(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> None:
        self._requests = list(requests)
        self._num_drafts = list(num_drafts)

    def filled(self) -> FilledMasks:
        """In the order of the requests; every token before the step must be known, and every draft.
        A request that ended meanwhile allows all: its tokens are dropped."""
        grammars = [request.grammar for request in self._requests]
        assert grammars and grammars[0] is not None
        shape = (len(grammars) + sum(self._num_drafts), grammars[0].num_words)
        masks = np.full(shape, _ALL, dtype=np.int32)
        counts: list[int] = []
        row = 0
        for request, grammar, most in zip(self._requests, grammars, self._num_drafts, strict=True):
            count = 1
            if grammar is not None and not request.is_finished:
                count = grammar.fill(masks, row, request.draft_token_ids[:most])
            counts.append(count)
            row += count
        return FilledMasks(masks[:row], counts)


class MaskQueue:
    """Masks on their way to a worker on another thread of this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[FilledMasks | None] = SimpleQueue()

    def send(self, masks: FilledMasks) -> None:
        self._queue.put(masks)

    def receive(self) -> FilledMasks:
        """See `ReceiveMasks`."""
        masks = self._queue.get()
        if masks is None:
            self.close()
            raise CancelledError("the step's masks are not coming: the engine stops")
        return masks

    def close(self) -> None:
        """Whoever waits, now or later, gets `CancelledError`."""
        self._queue.put(None)


def no_masks() -> FilledMasks:
    """`ReceiveMasks` of a worker that nobody sends any to."""
    raise RuntimeError("a step has constrained requests, but nobody sends their masks")
