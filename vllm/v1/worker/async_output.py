# SPDX-License-Identifier: Apache-2.0
"""A launched step whose results are on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)


@dataclass(frozen=True)
class PromptLogprobs:
    """Device logprobs of prompt positions of one request."""

    req_id: str
    tensors: LogprobsTensors


class StepOutput(AsyncModelRunnerOutput):
    """Copies are queued at construction; `get_output` waits for them on the caller's thread."""

    def __init__(
        self,
        req_ids: list[str],
        sampling: list[int],
        num_logprobs: list[int | None],
        sampled: SamplerOutput | None,
        prompt_logprobs: list[PromptLogprobs],
        kv_connector_output: KVConnectorOutput | None,
        failed_req_ids: dict[str, str],
        device: torch.device,
    ) -> None:
        self._req_ids = req_ids
        self._sampling = sampling
        self._num_logprobs = num_logprobs
        self._kv_connector_output = kv_connector_output
        self._failed = failed_req_ids
        self._ids: Tensor | None = None
        self._logprobs: LogprobsTensors | None = None
        if sampled is not None:
            self._ids = _to_host(sampled.sampled_token_ids)
            if sampled.logprobs is not None:
                self._logprobs = _logprobs_to_host(sampled.logprobs)
        self._prompt = [(p.req_id, _logprobs_to_host(p.tensors)) for p in prompt_logprobs]
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def get_output(self) -> ModelRunnerOutput:
        if self._event is not None:
            self._event.synchronize()
        tokens: list[list[int]] = [[] for _ in self._req_ids]
        logprobs: dict[str, LogprobsLists] = {}
        if self._ids is not None:
            for position, token in zip(self._sampling, self._ids.tolist(), strict=True):
                tokens[position] = [token]
        if self._logprobs is not None:
            lists = _to_lists(self._logprobs)
            for row, position in enumerate(self._sampling):
                asked = self._num_logprobs[row]
                if asked is not None:
                    logprobs[self._req_ids[position]] = LogprobsLists(
                        lists.token_ids[row : row + 1, : asked + 1],
                        lists.logprobs[row : row + 1, : asked + 1],
                        lists.ranks[row : row + 1],
                    )
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            sampled_token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs={req_id: _to_lists(tensors) for req_id, tensors in self._prompt},
            kv_connector_output=self._kv_connector_output,
            failed_req_ids=self._failed,
        )


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _logprobs_to_host(tensors: LogprobsTensors) -> LogprobsTensors:
    return LogprobsTensors(
        _to_host(tensors.token_ids), _to_host(tensors.logprobs), _to_host(tensors.ranks)
    )


def _to_lists(tensors: LogprobsTensors) -> LogprobsLists:
    return LogprobsLists(tensors.token_ids.numpy(), tensors.logprobs.numpy(), tensors.ranks.numpy())
