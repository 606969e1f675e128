# SPDX-License-Identifier: Apache-2.0
"""Messages between the front end and the engine core; msgpack on the wire."""

import enum
from typing import Any

import msgspec

from vllm.cache_options import CacheOptions, CacheReport
from vllm.sampling_params import SamplingParams


class EngineCoreRequestType(enum.Enum):
    """First frame of a message to the core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x02"
    SHUTDOWN = b"\x03"
    STOP = b"\x04"
    #: a further client, and the end of one
    ATTACH = b"\x05"
    DETACH = b"\x06"


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives the API's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated request: token ids and parameters, nothing the core has to check again."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    eos_token_id: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    client_index: int = 0
    trace_headers: dict[str, str] | None = None
    cache: CacheOptions = CacheOptions()
    #: the replica that it must go to; None leaves that to the front end
    data_parallel_rank: int | None = None


class StopRequest(msgspec.Struct, array_like=True):
    """The request ends after `num_output_tokens`: the front end found a stop string there, or has
    looked for one up to the request's own end."""

    request_id: str
    num_output_tokens: int


class RequestConflict(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A request cannot be completed as its client asked: the client's error, not the engine's."""

    message: str


class RequestFailure(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """An exception ended one request; the engine and its other requests go on. `stage`: what was
    done for the request then, one of `FAILURE_STAGES`."""

    stage: str
    message: str

    @classmethod
    def of(cls, stage: str, error: BaseException) -> "RequestFailure":
        return cls(stage, f"{type(error).__name__}: {error}")


#: in order: the prompt and parameters are processed (front end), the core takes the request, it is
#: admitted to a step, a worker prepares its inputs, samples, the scheduler takes its tokens, a
#: connector is told of its end, the front end makes its outputs; "unserved" are those for which
#: something else was missing, memory or state to load
FAILURE_STAGES = (
    "input",
    "receive",
    "schedule",
    "prepare",
    "sample",
    "results",
    "save",
    "output",
    "unserved",
)
#: why a request ended without what it asked for
RequestError = str | RequestConflict | RequestFailure


class WireLogprobs(msgspec.Struct, array_like=True):
    """`LogprobsLists` as raw little-endian bytes: ids int32 and logprobs fp32 `[rows, width]`,
    ranks int32 `[rows]`."""

    rows: int
    width: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request in one step; `finish_reason` set on its last message."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: WireLogprobs | None = None
    new_prompt_logprobs: WireLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    kv_transfer_params: dict[str, Any] | None = None
    #: prompt tokens found in a cache; with the first token and the last message, at least
    num_cached_tokens: int | None = None
    #: monotonic times in seconds of (queued, first scheduled), sent with the first token
    times: tuple[float, float] | None = None
    #: sent with the first token of a request that asked for it
    cache_report: CacheReport | None = None
    #: the request reached its own end, and its last message follows the front end's `StopRequest`
    awaits_stop: bool = False
    #: drafts that were accepted and rejected; with the last message, where there were any
    num_drafts: tuple[int, int] | None = None


class PlainOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """New tokens of requests that just go on, as arrays; see `vllm.v1.engine.plain_outputs`."""

    #: int32, request after request
    token_ids: bytes
    #: tokens of each request, int32 `[requests]`; None: one each
    counts: bytes | None = None
    #: in the order of the tokens; None: those of the message before
    request_ids: list[str] | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    """Reply to a utility call; `result` is pickled when it is not msgpack-native."""

    call_id: int
    error: str | None = None
    result: Any = None
    #: the caller's own mistake, and the parameter with it
    refused: bool = False
    parameter: str | None = None


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """Gauges, and what happened since the last ones were sent, for metrics; prefixes are counted in
    tokens."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    #: tokens each state group could have continued alone; tokens computed again, by reason
    group_hits: list[int] = []
    lost_tokens: dict[str, int] = {}
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    #: by position in the draft; how many are drafted varies from step to step
    drafted_per_position: list[int] = []
    accepted_per_position: list[int] = []
    connector: dict[str, Any] | None = None
    #: of the waiting ones, those that wait for something else than room
    num_deferred: int = 0
    #: draft tokens that the next step may verify of each request; steps by what it was before them
    num_drafts_allowed: int = 0
    steps_by_drafts: dict[int, int] = {}

    def add_drafts(self, count: int, accepted: int) -> None:
        """A request verified `count` drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += count
        self.num_accepted_tokens += accepted
        more = [0] * (count - len(self.drafted_per_position))
        self.drafted_per_position += more
        self.accepted_per_position += more
        for position in range(count):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def add_report(self, report: CacheReport) -> None:
        self.group_hits += [0] * (len(report.groups) - len(self.group_hits))
        for match in report.groups:
            self.group_hits[match.group] += match.matched_tokens
        if report.reason is not None:
            lost = self.lost_tokens.get(report.reason, 0)
            self.lost_tokens[report.reason] = lost + report.lost_tokens


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Everything one step sends to one client."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    #: the core is dead: the cause; nothing follows
    fatal: str | None = None
    #: how many of `outputs`, the first ones, hold nothing but tokens of requests that go on
    num_plain: int = 0
    #: those, when the message comes from another process
    plain: PlainOutputs | None = None
    #: rank of the replica that sent it; filled in by the front end
    engine_index: int = 0
