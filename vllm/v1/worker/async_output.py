# SPDX-License-Identifier: Apache-2.0
"""A launched step whose results are on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.step import Progress
from vllm.v1.engine import RequestError
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.worker.input_batch import InputBatch, StepOrder


@dataclass(frozen=True)
class PromptLogprobs:
    """Device logprobs of prompt positions of one request."""

    req_id: str
    tensors: LogprobsTensors


@dataclass(frozen=True)
class ProposedDrafts:
    """Drafts of all batch rows on the device, as `Progress` has them: `tokens [rows, width]`, of
    which the first is none, and `num_drafts [rows]`. `rows`: those that the host asks about, by
    request."""

    rows: dict[str, int]
    tokens: Tensor
    num_drafts: Tensor

    @classmethod
    def of_constrained(cls, batch: InputBatch, progress: Progress) -> ProposedDrafts | None:
        """Of the requests whose masks the host fills, also those that were not in the step."""
        if not batch.constrained:
            return None
        return cls(dict(batch.constrained), progress.tokens, progress.num_drafts)


class StepOutput(AsyncModelRunnerOutput):
    """Results of a step whose requests are in `order`.

    Copies are queued at construction; `get_output` waits for them on the caller's thread.
    """

    def __init__(
        self,
        order: StepOrder,
        vocab_size: int,
        sampled: SamplerOutput | None,
        prompt_logprobs: list[PromptLogprobs],
        kv_connector_output: KVConnectorOutput | None,
        failed_req_ids: dict[str, RequestError],
        device: torch.device,
        proposed: ProposedDrafts | None = None,
    ) -> None:
        self._order = order
        self._vocab_size = vocab_size
        self._kv_connector_output = kv_connector_output
        self._failed = failed_req_ids
        self._ids: Tensor | None = None
        self._counts: Tensor | None = None
        self._drafts: Tensor | None = None
        self._starts = order.sample_starts
        self._logprobs: LogprobsTensors | None = None
        if sampled is not None:
            self._ids = _to_host(sampled.sampled_token_ids)
            if sampled.verified is not None:
                self._counts, self._drafts = _to_host(sampled.verified)
            if sampled.logprobs is not None:
                self._logprobs = LogprobsTensors(*map(_to_host, sampled.logprobs))
        self._proposed: ProposedDrafts | None = None
        if proposed is not None:
            tokens, num_drafts = map(_to_host, (proposed.tokens, proposed.num_drafts))
            self._proposed = ProposedDrafts(proposed.rows, tokens, num_drafts)
        self._prompt = [
            (p.req_id, LogprobsTensors(*map(_to_host, p.tensors))) for p in prompt_logprobs
        ]
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def get_output(self) -> ModelRunnerOutput:
        if self._event is not None:
            self._event.synchronize()
        return ModelRunnerOutput(
            req_ids=self._order.req_ids,
            sampled_token_ids=self._tokens(),
            logprobs=self._logprobs_by_request(),
            prompt_logprobs={req_id: _to_lists(tensors) for req_id, tensors in self._prompt},
            kv_connector_output=self._kv_connector_output,
            failed_req_ids=self._failed,
            num_verified=self._num_verified(),
            draft_token_ids=self._draft_token_ids(),
        )

    def _draft_token_ids(self) -> dict[str, list[int]]:
        if self._proposed is None:
            return {}
        tokens, counts = self._proposed.tokens.numpy(), self._proposed.num_drafts.numpy()
        return {
            req_id: tokens[row, 1 : 1 + counts[row]].tolist()
            for req_id, row in self._proposed.rows.items()
        }

    def _num_verified(self) -> list[int]:
        """Drafts of each request of the step; empty without any."""
        if self._drafts is None:
            return []
        drafts = np.zeros(self._order.num_reqs, dtype=np.int64)
        drafts[self._order.sampling] = self._drafts.numpy()
        found: list[int] = drafts.tolist()
        return found

    def _tokens(self) -> list[list[int]]:
        """One list per request of the step, empty where nothing was sampled."""
        num_reqs = self._order.num_reqs
        if self._ids is None:
            return [[] for _ in range(num_reqs)]
        sampled: list[list[int]]
        if self._counts is None:
            sampled = self._ids.unsqueeze(1).tolist()
        else:
            ids = self._ids.tolist()
            spans = zip(self._starts.tolist(), self._counts.tolist(), strict=True)
            sampled = [ids[start : start + count] for start, count in spans]
        if len(sampled) == num_reqs:
            return sampled
        tokens: list[list[int]] = [[] for _ in range(num_reqs)]
        for position, own in zip(self._order.sampling.tolist(), sampled, strict=True):
            tokens[position] = own
        return tokens

    def _logprobs_by_request(self) -> dict[str, LogprobsLists]:
        if self._logprobs is None:
            return {}
        lists = _to_lists(self._logprobs)
        logprobs: dict[str, LogprobsLists] = {}
        for i, state in enumerate(self._order.sampled.states):
            first = int(self._starts[i])
            rows = slice(first, first + (1 if self._counts is None else int(self._counts[i])))
            asked = state.sampling_params.logprobs
            if asked is not None:
                width = 1 + (self._vocab_size if asked == -1 else asked)
                logprobs[state.req_id] = LogprobsLists(
                    lists.token_ids[rows, :width],
                    lists.logprobs[rows, :width],
                    lists.ranks[rows],
                )
        return logprobs


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _to_lists(tensors: LogprobsTensors) -> LogprobsLists:
    return LogprobsLists(*(part.numpy() for part in tensors))
