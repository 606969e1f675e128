# SPDX-License-Identifier: Apache-2.0
"""Scoring prompts: position p of a prompt scores token p + 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.async_output import PromptLogprobs
from vllm.v1.worker.input_batch import RequestState, StepOrder

#: rows of logits held at once; bounds memory at long prompts and large vocabularies
_ROWS_AT_ONCE = 512

#: of rows `[n, hidden]`: the logprobs of tokens `[n]` int64 and of the k likeliest
Score = Callable[[Tensor, Tensor, int], LogprobsTensors]


class PromptScorer:
    """Delivers each prompt position once, also when a preempted request computes it again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._delivered: dict[str, int] = {}

    def forget(self, req_id: str) -> None:
        self._delivered.pop(req_id, None)

    def score(self, order: StepOrder, hidden: Tensor, score: Score) -> list[PromptLogprobs]:
        """`hidden [tokens, hidden]` of the step -> logprobs of its newly scored positions."""
        results: list[PromptLogprobs] = []
        start = 0
        counts, lengths = order.num_scheduled.tolist(), order.lengths.tolist()
        for state, count, length in zip(order.states, counts, lengths, strict=True):
            if state.sampling_params.prompt_logprobs is not None:
                tensors = self._score_one(state, count, hidden[start : start + count], score)
                if tensors is not None:
                    results.append(PromptLogprobs(state.req_id, tensors))
            start += length
        return results

    def _score_one(
        self,
        state: RequestState,
        count: int,
        hidden: Tensor,
        score: Score,
    ) -> LogprobsTensors | None:
        done = self._delivered.get(state.req_id, 0)
        first = max(state.num_computed_tokens, done)
        last = min(state.num_computed_tokens + count, state.num_prompt_tokens - 1)
        if first >= last:
            return None
        self._delivered[state.req_id] = last
        rows = hidden[first - state.num_computed_tokens : last - state.num_computed_tokens]
        targets = torch.from_numpy(state.token_ids[first + 1 : last + 1])
        if hidden.device.type == "cuda":
            targets = targets.pin_memory().to(hidden.device, non_blocking=True)
        asked = state.sampling_params.prompt_logprobs
        assert asked is not None
        k = self._vocab_size if asked == -1 else asked
        parts = [
            score(part, target, k)
            for part, target in zip(
                rows.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True
            )
        ]
        return LogprobsTensors(*map(torch.cat, zip(*parts, strict=True)))
