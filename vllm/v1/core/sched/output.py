# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers each step. Integers only; pickled between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.messages import KVConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.step_shape import StepShape, padded_width
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of a group, all its layers, to another."""

    group_id: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlocksTaken:
    """Free blocks of a group were given to somebody, each with its new generation."""

    group_id: int
    block_ids: list[int]
    generations: list[int]


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Blocks of a group that nobody holds and the prefix cache cannot find any more."""

    group_id: int
    block_ids: list[int]


BlockOperation = BlocksTaken | BlocksFreed | BlockCopy


@dataclass
class NewRequestData:
    """A request's first appearance. `block_ids`: one list per group, complete for this step."""

    req_id: str
    prompt_token_ids: list[int]
    mm_features: list[Any]
    sampling_params: SamplingParams | None
    pooling_params: Any | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: Any | None = None
    prompt_embeds: Any | None = None

    @classmethod
    def from_request(cls, request: Request, block_ids: tuple[list[int], ...]) -> NewRequestData:
        assert request.prompt_token_ids is not None
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=None,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            lora_request=request.lora_request,
        )


@dataclass
class CachedRequestData:
    """Requests the workers already know, as parallel lists.

    `new_block_ids[i]`: per group, the blocks appended this step (None: none), or, when
    `req_ids[i] in resumed_req_ids`, the full replacement. `all_token_ids`: prompt + output tokens
    of every resumed request (its worker-side history was dropped at preemption).
    `num_output_tokens[i]` counts sampled tokens, including those still in flight. `new_token_ids`
    stays empty: workers keep the tokens they sampled.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls()


@dataclass
class SchedulerOutput:
    """One step's work.

    `num_scheduled_tokens`: request id -> tokens this step. A request samples a token in this step
    iff `num_computed_tokens + num_scheduled_tokens >= ` all its tokens known or in flight; the
    scheduler states it in `sampling_req_ids`, nobody recomputes it. `masked_req_ids`: those of them
    that follow a grammar; their masks are a second message, which follows the step (see
    `vllm.v1.structured_output.masks`). `preempted_req_ids` lost their blocks or part of their
    computed tokens; workers drop them (they come back in `resumed_req_ids`, possibly of the same
    step). `copies_before` are made before the forward pass,
    `copies_after` after it. `block_log` (only with `--sanitize`): what happened to blocks since the
    last step, in order; it contains `copies_before`. Its groups are those of all placements, the
    copies' those of the step's.

    `scheduled_spec_decode_tokens`: of requests that verify drafts in this step, these; -1 where
    only the device knows them. They are among the tokens of `num_scheduled_tokens`, and the request
    samples one token after each and one more.

    `kept_states`: of requests that leave while drafts of theirs are in flight, after how many
    tokens the recurrent state is kept; others leave it as their steps end.

    `num_next_drafts`: draft tokens that may be verified of each request after this step: drafters
    propose as many.

    `joint`: of a step that replicas which share experts take together: what all of them launch it
    as, those without tokens, too.

    `placement`: which of the placements of a supernet that the engine has the step runs; all its
    requests use it, and blocks and copies are of this placement's groups, counted from 0.

    `pause_s`: of a step without tokens, how long workers wait in it for a transfer to end.

    `unscheduled`: of a step of padding for other replicas that is between the scheduler's: nobody
    takes in its result, so no connector acts in it.

    Steps with the same `decode_set_id`, unless it is 0, run the same requests in the same order;
    each decodes equally many tokens and samples. Such steps share `num_scheduled_tokens`,
    `sampling_req_ids` and `scheduled_cached_reqs.req_ids`, which nobody changes.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)
    preempted_req_ids: set[str] = field(default_factory=set)
    sampling_req_ids: set[str] = field(default_factory=set)
    decode_set_id: int = 0
    copies_before: list[BlockCopy] = field(default_factory=list)
    copies_after: list[BlockCopy] = field(default_factory=list)
    block_log: list[BlockOperation] | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None
    masked_req_ids: list[str] = field(default_factory=list)
    kept_states: dict[str, int] = field(default_factory=dict)
    num_next_drafts: int = 0
    placement: int = 0
    joint: StepShape | None = None
    pause_s: float = 0.0
    unscheduled: bool = False

    def shape(self, widths: Sequence[int]) -> StepShape:
        """`widths`: what decodes may be padded to (`VllmConfig.step_widths`). The shape of no
        request is `decode_only`."""
        counts, drafts = self.num_scheduled_tokens, self.scheduled_spec_decode_tokens
        num_reqs = len(counts)
        width = padded_width(widths, max((counts[one] for one in drafts), default=1))
        if self.decode_set_id or not num_reqs:
            return StepShape(num_reqs * width, num_reqs, 0, True, width)
        cached = self.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in self.scheduled_new_reqs)
        prefills = [
            count
            for one, count in counts.items()
            if one not in drafts and (count > 1 or not computed[one])
        ]
        tokens = sum(prefills) + (num_reqs - len(prefills)) * width
        decode_only = not prefills and len(self.sampling_req_ids) == num_reqs
        return StepShape(tokens, num_reqs, len(prefills), decode_only, width)

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        return cls([], CachedRequestData.make_empty(), {}, 0)
