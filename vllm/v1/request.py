# SPDX-License-Identifier: Apache-2.0
"""A request inside the engine core."""

from __future__ import annotations

import enum
import sys
from typing import Any

from vllm.cache_options import CacheOptions, CacheReport
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHasher
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError
from vllm.v1.structured_output.grammar import RequestGrammar


class RequestStatus(enum.IntEnum):
    """Life of a request; everything after PREEMPTED is final."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        return status > RequestStatus.PREEMPTED

    @staticmethod
    def get_finished_reason(status: RequestStatus) -> FinishReason | None:
        return _FINISH_REASONS.get(status)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


_NO_OPTIONS = CacheOptions()


def _stop_ids(params: SamplingParams, eos_token_id: int | None) -> frozenset[int]:
    ends = set(params.stop_token_ids or ())
    if eos_token_id is not None and not params.ignore_eos:
        ends.add(eos_token_id)
    return frozenset(ends)


class Request:
    """Tokens, progress and block hashes of one request.

    `num_computed_tokens` advances when a step is scheduled, by drafts too, and goes back by those
    that turn out to be rejected. `num_output_placeholders` counts sampled tokens whose value has
    not come back yet, as if all drafts were accepted, and `discard_outputs` how many of those must
    be dropped on arrival (they were sampled before a preemption and will be sampled again).
    `num_state_tokens` is what the recurrent state on the device has taken in once every scheduled
    step has run: unlike `num_computed_tokens` it is set back by rejected drafts alone, and to 0
    when there is no state any more. `length_limit`: known
    tokens at which the request ends.

    `quiet_until`: while a step takes the request to at most so many computed tokens, it computes
    the newest token and as many drafts as there can be, and nothing else has to be decided (see
    `Scheduler`).
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams | None,
        pooling_params: Any | None = None,
        eos_token_id: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        client_index: int = 0,
        lora_request: Any | None = None,
        mm_features: list[Any] | None = None,
        cache: CacheOptions = _NO_OPTIONS,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.eos_token_id = eos_token_id
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.client_index = client_index
        self.lora_request = lora_request
        self.mm_features = mm_features or []
        self.cache = cache
        self.cache_report: CacheReport | None = None
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.error: RequestError | None = None
        #: which of the engine's placements of a supernet it runs with, 0 the engine's own
        self.placement = 0
        #: whether that is not known yet: its placement waits for a part of the memory
        self.awaits_placement = False
        self.all_token_ids: list[int] = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_state_tokens = 0
        #: what the workers were told of `all_token_ids`; they sampled the others
        self.num_told_tokens = 0
        self.quiet_until = 0
        #: number of the last step in which it sampled a token (see `Scheduler`)
        self.last_sampling_step = 0
        self.num_cached_tokens = -1
        self.num_external_computed_tokens = 0
        #: of its state by a connector
        self.num_failed_loads = 0
        self.num_preemptions = 0
        self.num_output_placeholders = 0
        #: tokens of steps in flight that count as computed and may turn out to be rejected
        self.num_drafts_in_flight = 0
        self.discard_outputs = 0
        #: drafts that were verified so far, and those accepted of them
        self.num_verified_drafts = 0
        self.num_accepted_drafts = 0
        #: monotonic seconds: entered the waiting queue, first scheduled
        self.queued_time = 0.0
        self.first_scheduled_time = 0.0
        self.max_tokens = 0
        self.length_limit = self.num_prompt_tokens
        #: tokens that may end the output
        self.stop_ids: frozenset[int] = frozenset()
        #: those of them after which the device may compute nothing (`VllmConfig.ends_rows`)
        self.device_stop_ids: frozenset[int] = frozenset()
        #: what constrains the output, None for free text
        self.grammar: RequestGrammar | None = None
        #: with a grammar: what the workers will verify after its newest token
        self.draft_token_ids: list[int] = []
        self.kv_transfer_params: dict[str, Any] | None = None
        #: whether the front end may still find a stop string, which would end it earlier
        self.may_stop_earlier = False
        if sampling_params is not None:
            assert sampling_params.max_tokens is not None
            self.limit_output(sampling_params.max_tokens)
            self.stop_ids = _stop_ids(sampling_params, eos_token_id)
            self.device_stop_ids = frozenset(sampling_params.device_stop_ids)
            extra = sampling_params.extra_args or {}
            self.kv_transfer_params = extra.get("kv_transfer_params")
            self.may_stop_earlier = bool(sampling_params.stop)
        self._block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._prefix_hashes: dict[int, BlockHash] = {}
        #: known tokens that complete the next block to hash
        self._next_hash_at = sys.maxsize if block_hasher is None else block_hasher.block_size
        self._extend_block_hashes()

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        block_hasher: BlockHasher | None = None,
    ) -> Request:
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            eos_token_id=request.eos_token_id,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            client_index=request.client_index,
            cache=request.cache,
            block_hasher=block_hasher,
        )

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Of every full block of known tokens; hashed when first asked for."""
        if len(self.all_token_ids) >= self._next_hash_at:
            self._extend_block_hashes()
        return self._block_hashes

    def _extend_block_hashes(self) -> None:
        hasher = self._block_hasher
        if hasher is None:
            return
        self._next_hash_at = sys.maxsize  # the hasher reads `block_hashes`
        self._block_hashes.extend(hasher(self))
        self._next_hash_at = (len(self._block_hashes) + 1) * hasher.block_size

    @property
    def hash_block_size(self) -> int:
        """Tokens per entry of `block_hashes`."""
        assert self._block_hasher is not None
        return self._block_hasher.block_size

    def prefix_parent(self, num_tokens: int) -> BlockHash:
        """Hash of the full blocks of the first `num_tokens` tokens."""
        assert self._block_hasher is not None
        return self._block_hasher.parent(self, num_tokens)

    def prefix_hash(self, num_tokens: int) -> BlockHash:
        """Hash of exactly the first `num_tokens` tokens, all known."""
        found = self._prefix_hashes.get(num_tokens)
        if found is None:
            assert self._block_hasher is not None
            found = self._prefix_hashes[num_tokens] = self._block_hasher.prefix(self, num_tokens)
        return found

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Add tokens that came back from the workers."""
        if isinstance(token_ids, int):
            self.output_token_ids.append(token_ids)
            self.all_token_ids.append(token_ids)
        else:
            self.output_token_ids.extend(token_ids)
            self.all_token_ids.extend(token_ids)

    def end_at_newest(self) -> None:
        """The newest token ends the request, and the device knew that: what is in flight computes
        nothing of it."""
        self.num_computed_tokens = self.num_state_tokens = self.num_tokens - 1
        self.num_drafts_in_flight = 0

    def limit_output(self, max_tokens: int) -> None:
        """Let the request end after `max_tokens` output tokens."""
        self.max_tokens = max_tokens
        self.length_limit = self.num_prompt_tokens + max_tokens

    def truncate_prompt(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens of the prompt of a request that is not
        queued yet."""
        assert not self.output_token_ids
        self.prompt_token_ids = self.prompt_token_ids[:num_tokens]
        self.num_prompt_tokens = num_tokens
        self.limit_output(self.max_tokens)
        self._truncate(num_tokens)

    def end_with(self, token_id: int) -> None:
        """Let `token_id` be the only output of a request that is not queued yet, whatever the model
        says, and whatever its sampling parameters ask."""
        given = self.sampling_params
        assert given is not None and not self.output_token_ids
        self.sampling_params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            allowed_token_ids=[token_id],
            logprobs=given.logprobs,
            detokenize=given.detokenize,
            placement=given.placement,
            extra_args=given.extra_args,
        )
        self.grammar = None
        self.stop_ids = self.device_stop_ids = frozenset()
        self.may_stop_earlier = False
        self.limit_output(1)

    def truncate_output(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` output tokens."""
        if self.grammar is not None:
            self.grammar.rewind(num_tokens)
        del self.output_token_ids[num_tokens:]
        self._truncate(self.num_prompt_tokens + num_tokens)

    def _truncate(self, num_tokens: int) -> None:
        del self.all_token_ids[num_tokens:]
        self.quiet_until = 0
        self._prefix_hashes.clear()
        if self._block_hasher is not None:
            self._block_hashes.clear()
            self._next_hash_at = self._block_hasher.block_size

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def draft_counts(self) -> tuple[int, int] | None:
        """Drafts that were accepted and rejected; None if there were none."""
        verified, accepted = self.num_verified_drafts, self.num_accepted_drafts
        return (accepted, verified - accepted) if verified else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)

    def get_finished_reason(self) -> FinishReason | None:
        return RequestStatus.get_finished_reason(self.status)

    def last_output(self, kv_transfer_params: dict[str, Any] | None) -> EngineCoreOutput:
        """The message of its end, without a new token; `kv_transfer_params`: the connector's, for
        the client."""
        return EngineCoreOutput(
            self.request_id,
            [],
            finish_reason=self.get_finished_reason(),
            stop_reason=self.stop_reason,
            error=self.error,
            kv_transfer_params=kv_transfer_params,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            num_drafts=self.draft_counts,
        )

    def __lt__(self, other: Request) -> bool:
        """Priority order: smaller `priority` first, then arrival, then id."""
        return (self.priority, self.arrival_time, self.request_id) < (
            other.priority,
            other.arrival_time,
            other.request_id,
        )
