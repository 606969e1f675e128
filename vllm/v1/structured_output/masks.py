# SPDX-License-Identifier: Apache-2.0
"""The token masks of one step, on their way from the engine core to the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ALL = -1


class StepMasks:
    """One row per constrained request that samples in the step.

    The step is launched first. The core fills the rows while the device runs the forward pass, as
    soon as every token sampled before the step is known; the launching thread waits for them
    between the forward pass and the sampler, on the host alone. An executor whose workers live
    in other processes sends the result of `wait` after the step it belongs to.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)
        self.req_ids = [request.request_id for request in requests]
        self._filled: Future[np.ndarray] = Future()

    def fill(self) -> None:
        """Fill every row, once. A request that ended meanwhile allows all: its token is dropped."""
        if self._filled.done():
            return
        grammars = [request.grammar for request in self._requests]
        assert grammars and grammars[0] is not None
        masks = np.full((len(grammars), grammars[0].num_words), _ALL, dtype=np.int32)
        for row, (request, grammar) in enumerate(zip(self._requests, grammars, strict=True)):
            if grammar is not None and not request.is_finished:
                grammar.fill(masks, row)
        self._filled.set_result(masks)

    def cancel(self) -> None:
        """The step is given up: whoever waits gets `CancelledError`."""
        self._filled.cancel()

    def wait(self) -> np.ndarray:
        """`[rows, words]` int32, in the order of `req_ids`."""
        return self._filled.result()
