# SPDX-License-Identifier: Apache-2.0
"""The requests a worker knows, and the order of one step.

Every request keeps one row for its whole life. A step picks rows in its own order (decodes first),
so nothing is ever moved when requests come and go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.step_shape import StepShape, padded_width


@dataclass(frozen=True, eq=False)
class RequestState:
    """Worker-side state of one request; what changes with every step is in the batch's arrays.

    `token_ids`: the tokens the host knows (prompt, and at a resume also the output so far); tokens
    past them were sampled here, and the device has the newest (`Progress.tokens[row]`).
    """

    batch: InputBatch = field(repr=False)
    req_id: str
    row: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    sampling_params: SamplingParams

    @property
    def num_computed_tokens(self) -> int:
        return int(self.batch.num_computed[self.row])

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, known to the host or not."""
        return int(self.batch.num_output[self.row])


@dataclass(frozen=True)
class SampledRequests:
    """The requests of a step that sample a token, in its order."""

    states: list[RequestState] = field(default_factory=list)
    req_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepOrder:
    """One step's requests, decodes first.

    All arrays are `[num_reqs]`: `rows`, tokens scheduled, tokens computed before the step (at most,
    where only the device knows), tokens the host knows. Each decode runs `width` tokens: those
    scheduled, then padding. `sampling [n]`: positions in this order of the requests that sample,
    who are `sampled`; a decode does so after each of its `width` tokens, a prefill after its last.
    """

    req_ids: list[str]
    states: list[RequestState]
    rows: np.ndarray
    num_scheduled: np.ndarray
    num_computed: np.ndarray
    num_known: np.ndarray
    num_decodes: int
    sampling: np.ndarray
    sampled: SampledRequests = field(default_factory=SampledRequests)
    width: int = 1

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def decode_only(self) -> bool:
        """Every request decodes and samples; a one-token piece of a prompt does not."""
        return self.num_decodes == len(self.sampling) == len(self.req_ids)

    @property
    def num_samples(self) -> np.ndarray:
        """`[n]`: tokens sampled for each request that samples, after drafts too."""
        return np.where(self.sampling < self.num_decodes, self.width, 1)

    @property
    def sample_starts(self) -> np.ndarray:
        """`[n]`: the first of each request's samples among those of the step."""
        counts = self.num_samples
        return np.cumsum(counts) - counts

    def places_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """`[n]`: the places of these requests among those that sample."""
        place_of = {req_id: place for place, req_id in enumerate(self.sampled.req_ids)}
        return np.array([place_of[req_id] for req_id in req_ids], dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """`[num_reqs]`: tokens each request runs, a decode's padding included."""
        if self.width == 1:
            return self.num_scheduled
        decodes = np.arange(self.num_reqs) < self.num_decodes
        return np.where(decodes, self.width, self.num_scheduled)

    @property
    def shape(self) -> StepShape:
        """What decides which graph the step replays."""
        decode_only, num_reqs = self.decode_only, self.num_reqs
        tokens = num_reqs * self.width if decode_only else int(self.lengths.sum())
        return StepShape(tokens, num_reqs, num_reqs - self.num_decodes, decode_only, self.width)


class InputBatch:
    """Rows by request id; free rows are reused smallest first.

    `[max_rows]` int64 by row: tokens the host knows, tokens computed by the steps launched so far,
    tokens sampled by them. Of rows that verify drafts the last two are bounds: at most so many
    computed, at least so many sampled. A step verifies them in one of the `widths` (ascending), in
    tokens per request: the least that has room for each request's.
    """

    def __init__(self, max_rows: int, widths: Sequence[int] = (1,), num_sets: int = 1) -> None:
        """`num_sets`: sets of decodes that take turns."""
        self.max_rows = max_rows
        self.widths = tuple(widths)
        self.known_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_computed = np.zeros(max_rows, dtype=np.int64)
        self.num_output = np.zeros(max_rows, dtype=np.int64)
        self.requests: dict[str, RequestState] = {}
        #: rows of the requests that follow a grammar
        self.constrained: dict[str, int] = {}
        self._free_rows = list(range(max_rows - 1, -1, -1))
        #: the last orders and their sets of decodes (0: none), while all requests have their rows
        self._orders: deque[tuple[int, StepOrder]] = deque(maxlen=num_sets)

    def add(
        self,
        req_id: str,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling_params: SamplingParams,
        num_computed_tokens: int,
    ) -> RequestState:
        if not self._free_rows:
            raise RuntimeError(f"more than {self.max_rows} requests on one worker")
        row = self._free_rows.pop()
        known = np.array(token_ids, dtype=np.int64)
        state = RequestState(self, req_id, row, known, num_prompt_tokens, sampling_params)
        self.requests[req_id] = state
        if sampling_params.structured_outputs is not None:
            self.constrained[req_id] = row
        self.known_tokens[row] = len(token_ids)
        self.num_computed[row] = num_computed_tokens
        self.num_output[row] = len(token_ids) - num_prompt_tokens
        return state

    def remove(self, req_id: str) -> RequestState | None:
        state = self.requests.pop(req_id, None)
        if state is not None:
            self.constrained.pop(req_id, None)
            self._free_rows.append(state.row)
            self._orders.clear()
        return state

    def set_computed(
        self, req_ids: list[str], num_computed: list[int], decode_set_id: int = 0
    ) -> None:
        """Tokens computed, as the host knows by now how many drafts of older steps were accepted;
        of those that have a row. The rows of a set of decodes are looked up once."""
        for set_id, last in self._orders if decode_set_id else ():
            if set_id == decode_set_id and last.req_ids == req_ids:
                self.num_computed[last.rows] = num_computed
                return
        for req_id, computed in zip(req_ids, num_computed, strict=True):
            if (state := self.requests.get(req_id)) is not None:
                self.num_computed[state.row] = computed

    def order(
        self, num_scheduled: dict[str, int], sampling_req_ids: set[str], decode_set_id: int = 0
    ) -> StepOrder:
        """Decodes (the newest token and drafts, or one token after some context) first, then
        prefills, each in schedule order.

        The order of a set of decodes (see `SchedulerOutput.decode_set_id`) is made once.
        """
        for set_id, last in self._orders if decode_set_id else ():
            if set_id == decode_set_id:
                self._orders.append((set_id, last))
                return replace(last, num_computed=self.num_computed[last.rows])
        states = [self.requests[req_id] for req_id in num_scheduled]
        rows = np.array([state.row for state in states], dtype=np.int64)
        counts = np.array(list(num_scheduled.values()), dtype=np.int64)
        computed = self.num_computed[rows]
        ahead = (computed >= self.known_tokens[rows]) & (counts <= self.widths[-1])
        decodes = (counts == 1) & (computed > 0) | ahead
        width = padded_width(self.widths, int(counts[decodes].max(initial=1)))
        order_of = np.argsort(~decodes, kind="stable")
        rows, counts = rows[order_of], counts[order_of]
        states = [states[i] for i in order_of.tolist()]
        req_ids = [state.req_id for state in states]
        sampling = [i for i, req_id in enumerate(req_ids) if req_id in sampling_req_ids]
        order = StepOrder(
            req_ids=req_ids,
            states=states,
            rows=rows,
            num_known=self.known_tokens[rows],
            num_scheduled=counts,
            num_computed=self.num_computed[rows],
            num_decodes=int(decodes.sum()),
            sampling=np.array(sampling, dtype=np.int64),
            sampled=SampledRequests([states[i] for i in sampling], [req_ids[i] for i in sampling]),
            width=width,
        )
        self._orders.append((decode_set_id, order))
        return order

    def advance(self, order: StepOrder) -> None:
        """The step is launched: its tokens count as computed, those it samples as sampled."""
        self.num_computed[order.rows] += order.num_scheduled
        self.num_output[order.rows[order.sampling]] += 1
