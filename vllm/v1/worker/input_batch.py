# SPDX-License-Identifier: Apache-2.0
"""The requests a worker knows, and the order of one step.

Every request keeps one row for its whole life. A step picks rows in its own order (decodes first),
so nothing is ever moved when requests come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm.sampling_params import SamplingParams


@dataclass
class RequestState:
    """Worker-side state of one request.

    `token_ids`: the tokens the host knows (prompt, and at a resume also the output so far); tokens
    past them were sampled here and live in the device's `last_sampled[row]`.
    """

    req_id: str
    row: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    sampling_params: SamplingParams
    num_computed_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True)
class StepOrder:
    """One step's requests, decodes first.

    All arrays are `[num_reqs]`: `rows`, tokens scheduled, tokens computed before the step, tokens
    the host knows. `sampling [n]`: positions in this order of the requests that sample a token.
    """

    req_ids: list[str]
    states: list[RequestState]
    rows: np.ndarray
    num_scheduled: np.ndarray
    num_computed: np.ndarray
    num_known: np.ndarray
    num_decodes: int
    sampling: np.ndarray

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def decode_only(self) -> bool:
        """Every request runs one token and samples; a one-token piece of a prompt does not."""
        return self.num_decodes == len(self.sampling) == len(self.req_ids)


class InputBatch:
    """Rows by request id; free rows are reused smallest first."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        #: tokens of each row that the host knows
        self.known_tokens = np.zeros(max_rows, dtype=np.int64)
        self.requests: dict[str, RequestState] = {}
        self._free_rows = list(range(max_rows - 1, -1, -1))

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
        state = RequestState(
            req_id,
            self._free_rows.pop(),
            np.array(token_ids, dtype=np.int64),
            num_prompt_tokens,
            sampling_params,
            num_computed_tokens,
            len(token_ids) - num_prompt_tokens,
        )
        self.requests[req_id] = state
        self.known_tokens[state.row] = len(token_ids)
        return state

    def remove(self, req_id: str) -> RequestState | None:
        state = self.requests.pop(req_id, None)
        if state is not None:
            self._free_rows.append(state.row)
        return state

    def order(self, num_scheduled: dict[str, int], sampling_req_ids: set[str]) -> StepOrder:
        """Decodes (one token after some context) first, then prefills, each in schedule order."""
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for req_id, count in num_scheduled.items():
            state = self.requests[req_id]
            decode = count == 1 and state.num_computed_tokens > 0
            (decodes if decode else prefills).append(state)
        states = decodes + prefills
        req_ids = [state.req_id for state in states]
        rows = np.array([s.row for s in states], dtype=np.int64)
        return StepOrder(
            req_ids=req_ids,
            states=states,
            rows=rows,
            num_known=self.known_tokens[rows],
            num_scheduled=np.array([num_scheduled[r] for r in req_ids], dtype=np.int64),
            num_computed=np.array([s.num_computed_tokens for s in states], dtype=np.int64),
            num_decodes=len(decodes),
            sampling=np.array(
                [i for i, r in enumerate(req_ids) if r in sampling_req_ids], dtype=np.int64
            ),
        )
