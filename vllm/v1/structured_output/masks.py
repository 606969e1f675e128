# SPDX-License-Identifier: Apache-2.0
"""The token masks of a step: a message of their own, which follows the step's.

A step is launched first. The core fills its masks while the device runs the forward pass, as soon
as every token sampled before the step is known; the worker takes them between the forward pass and
the sampler, and waits for them there, on the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue

import numpy as np

from vllm.v1.request import Request

_ALL = -1

#: Waits for the masks of the next step that has any: `[rows, words]` int32, one row for each of its
#: `masked_req_ids`, in that order. `CancelledError` if the step is given up.
ReceiveMasks = Callable[[], np.ndarray]


class StepMasks:
    """The core's side: the constrained requests that sample in a step."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def filled(self) -> np.ndarray:
        """`[rows, words]` int32, in the order of the requests; every token before the step must be
        known. A request that ended meanwhile allows all: its token is dropped."""
        grammars = [request.grammar for request in self._requests]
        assert grammars and grammars[0] is not None
        masks = np.full((len(grammars), grammars[0].num_words), _ALL, dtype=np.int32)
        for row, (request, grammar) in enumerate(zip(self._requests, grammars, strict=True)):
            if grammar is not None and not request.is_finished:
                grammar.fill(masks, row)
        return masks


class MaskQueue:
    """Masks on their way to a worker on another thread of this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[np.ndarray | None] = SimpleQueue()

    def send(self, words: np.ndarray) -> None:
        self._queue.put(words)

    def receive(self) -> np.ndarray:
        """See `ReceiveMasks`."""
        words = self._queue.get()
        if words is None:
            self.close()
            raise CancelledError("the step's masks are not coming: the engine stops")
        return words

    def close(self) -> None:
        """Whoever waits, now or later, gets `CancelledError`."""
        self._queue.put(None)


def no_masks() -> np.ndarray:
    """`ReceiveMasks` of a worker that nobody sends any to."""
    raise RuntimeError("a step has constrained requests, but nobody sends their masks")
