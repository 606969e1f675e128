# SPDX-License-Identifier: Apache-2.0
"""A step while the scheduler puts it together, and what repeats from one decode to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.request import Request

#: a draft token, whose value only the device knows
UNKNOWN = -1
#: per group, the blocks appended to a request; None for no blocks
NewBlocks = tuple[list[int], ...] | None


@dataclass(slots=True)
class StepPlan:
    """Who runs how many tokens, in the order of scheduling, and with which placement.

    `requests`, `counts` (tokens) and `blocks` are parallel; `blocks` is what the workers are told
    of a request they know. `only_decodes`: every request computes the newest token, and equally
    many drafts, and samples after each.
    """

    token_budget: int
    placement: int = 0
    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    blocks: list[NewBlocks] = field(default_factory=list)
    new: list[NewRequestData] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    only_decodes: bool = True
    #: of requests that verify drafts, their tokens
    drafts: dict[str, int] = field(default_factory=dict)

    def add(self, request: Request, num_tokens: int, blocks: NewBlocks) -> None:
        self.requests.append(request)
        self.counts.append(num_tokens)
        self.blocks.append(blocks)
        self.token_budget -= num_tokens

    def add_new(self, request: Request, num_tokens: int, blocks: tuple[list[int], ...]) -> None:
        self.new.append(NewRequestData.from_request(request, blocks))
        self.add(request, num_tokens, None)

    def add_resumed(self, request: Request, num_tokens: int, blocks: tuple[list[int], ...]) -> None:
        self.resumed.append(request)
        self.add(request, num_tokens, blocks)

    def num_scheduled_tokens(self) -> dict[str, int]:
        ids = (request.request_id for request in self.requests)
        return dict(zip(ids, self.counts, strict=True))

    def cached_data(self) -> CachedRequestData:
        """What is told of the requests the workers know; before any of them advances."""
        new = {data.req_id for data in self.new}
        cached: Sequence[Request] = self.requests
        blocks = self.blocks
        if new:
            known = [i for i, r in enumerate(self.requests) if r.request_id not in new]
            cached, blocks = [cached[i] for i in known], [blocks[i] for i in known]
        return CachedRequestData(
            req_ids=[r.request_id for r in cached],
            resumed_req_ids={r.request_id for r in self.resumed},
            all_token_ids={r.request_id: list(r.all_token_ids) for r in self.resumed},
            new_block_ids=blocks,
            num_computed_tokens=[r.num_computed_tokens for r in cached],
            num_output_tokens=[len(r.output_token_ids) + r.num_output_placeholders for r in cached],
        )


class DecodeSet:
    """Requests that decode together, step after step: what every step says of them again.

    `set_id` numbers the sets of a scheduler. The lists are shared by all steps of the set; nobody
    changes them. Every step runs `width` tokens of each request. A set ends with the first step
    that runs anything else.
    """

    def __init__(self, set_id: int, requests: Sequence[Request], width: int) -> None:
        self.set_id = set_id
        self.width = width
        self.requests = list(requests)
        self.req_ids = [request.request_id for request in requests]
        self.num_scheduled_tokens = dict.fromkeys(self.req_ids, width)
        self.drafts = drafts_of(self.num_scheduled_tokens) if width > 1 else {}
        self.sampling_req_ids = set(self.req_ids)
        self.constrained = [request for request in requests if request.grammar is not None]
        self._num_before_output = [request.num_prompt_tokens - 1 for request in requests]

    def cached_data(self, plan: StepPlan) -> CachedRequestData:
        """As `StepPlan.cached_data`, of a plan for these requests."""
        computed = [request.num_computed_tokens for request in self.requests]
        return CachedRequestData(
            req_ids=self.req_ids,
            resumed_req_ids={r.request_id for r in plan.resumed},
            all_token_ids={r.request_id: list(r.all_token_ids) for r in plan.resumed},
            new_block_ids=plan.blocks,
            num_computed_tokens=computed,
            num_output_tokens=[
                n - before for n, before in zip(computed, self._num_before_output, strict=True)
            ],
        )

    def advance(self) -> None:
        """Count the step's tokens as computed, and as many of every request as sampled."""
        width = self.width
        for request in self.requests:
            computed = request.num_computed_tokens + width
            request.num_computed_tokens = request.num_state_tokens = computed
            request.num_output_placeholders += width
            request.num_drafts_in_flight += width - 1


def drafts_of(num_tokens: Mapping[str, int]) -> dict[str, list[int]]:
    """`SchedulerOutput.scheduled_spec_decode_tokens` of requests that verify drafts."""
    return {req_id: [UNKNOWN] * (count - 1) for req_id, count in num_tokens.items() if count > 1}
