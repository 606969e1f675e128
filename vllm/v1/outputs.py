# SPDX-License-Identifier: Apache-2.0
"""What a worker returns from a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vllm.v1.engine import RequestError

#: what stands for a token where every one of a row was barred, or the logits are no numbers
NO_TOKEN = -1


@dataclass
class SamplerOutput:
    """Device-side result: `sampled_token_ids [n]` int64 (`NO_TOKEN` where there was none to
    sample); logprobs tensors or None. `verified [2, requests]` int32 where drafts were verified:
    how many of each request's tokens, from its first on, are output; how many drafts it had."""

    sampled_token_ids: Tensor
    logprobs: LogprobsTensors | None = None
    verified: Tensor | None = None


class LogprobsTensors(NamedTuple):
    """Device tensors, one row per token: ids `[n, k + 1]` (column 0: the chosen or actual token,
    then the top k), `logprobs [n, k + 1]` fp32, `ranks [n]` (1 = most likely) of the chosen."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor


class LogprobsLists(NamedTuple):
    """`LogprobsTensors` on the host, as numpy arrays of the same shapes."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def row(self, i: int) -> LogprobsLists:
        return LogprobsLists(*(part[i : i + 1] for part in self))


@dataclass
class KVConnectorOutput:
    """What a worker's connector reports for a step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any | None = None
    kv_cache_events: Any | None = None
    kv_connector_worker_meta: Any | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    #: `(state group, block)`
    invalid_blocks: set[tuple[int, int]] = field(default_factory=set)
    expected_finished_count: int = 0

    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
            or self.invalid_block_ids
            or self.invalid_blocks
        )


@dataclass
class ModelRunnerOutput:
    """A finished step on the host.

    `sampled_token_ids[i]`: tokens sampled for `req_ids[i]` (empty list while prefilling).
    `num_verified[i]`: draft tokens of it that were verified (empty: of nobody).
    `logprobs[req_id]`: one row per sampled token. `prompt_logprobs[req_id]`: rows for the prompt
    positions scored in this step (position p scores token p + 1), to be concatenated over chunks.
    `failed_req_ids`: request id -> reason, requests the worker could not serve correctly.
    `draft_token_ids`: with a drafter, of every request that follows a grammar, in the step or not,
    the drafts after its newest token, of which its next step verifies as many as it has room for.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    failed_req_ids: dict[str, RequestError] = field(default_factory=dict)
    num_verified: list[int] = field(default_factory=list)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {req_id: i for i, req_id in enumerate(self.req_ids)}


class AsyncModelRunnerOutput(ABC):
    """A step that was launched; the device may still be running it."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the results to reach the host and return them."""


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
