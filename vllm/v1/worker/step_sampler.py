# SPDX-License-Identifier: Apache-2.0
"""The sampling part of a step, and what it keeps of each request from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.adjustments import Adjustments
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.worker.input_batch import RequestState, SampledRequests, StepOrder


class StepSampler:
    """Holds the adjustments of requests that ask for some, and the metadata of the last step's
    requests, which serves again while these stay the same."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._adjustments: dict[str, Adjustments] = {}
        self._key: list[str] | None = None
        self._metadata: SamplingMetadata | None = None

    def add(self, state: RequestState) -> None:
        """A request has its row, with the tokens that the host knows."""
        params = state.sampling_params
        if Adjustments.needed(params):
            self._adjustments[state.req_id] = Adjustments(
                params, state.token_ids, state.num_prompt_tokens, self._vocab_size, self._device
            )

    def remove(self, req_id: str) -> None:
        """A request has lost its row; one of the same id may have other parameters."""
        self._adjustments.pop(req_id, None)
        self._key = None

    def sample(
        self, order: StepOrder, logits: Tensor, positions: Tensor, masks: TokenMasks | None
    ) -> SamplerOutput | None:
        """Tokens of the requests that sample, from `logits [n, vocab]` for `positions [n]`; None if
        there are none."""
        if not len(order.sampling):
            return None
        adjusted = [
            (row, self._adjustments[state.req_id], state.num_output_tokens)
            for row, state in enumerate(order.sampled.states if self._adjustments else ())
            if state.req_id in self._adjustments
        ]
        return sample(logits, self._metadata_of(order.sampled), positions, adjusted, masks)

    def _metadata_of(self, sampled: SampledRequests) -> SamplingMetadata:
        if self._metadata is None or sampled.req_ids != self._key:
            params = [state.sampling_params for state in sampled.states]
            self._metadata = SamplingMetadata.build(params, self._vocab_size, self._device)
            self._key = sampled.req_ids
        return self._metadata
