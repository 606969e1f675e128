# SPDX-License-Identifier: Apache-2.0
"""The requests of one device: their rows in the persistent batch, as the scheduler changes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.model_on_device import ModelOnDevice
from vllm.v1.worker.prompt_logprobs import PromptScorer


@dataclass(frozen=True)
class Prompt:
    """What outlives a preemption: the parameters, the prompt's length and the placement."""

    sampling_params: SamplingParams
    num_tokens: int
    placement: int


class RequestsOnDevice(ModelOnDevice):
    """A model with the requests that it runs: each has a row of the batch, of the block tables, and
    of what sampler, drafter and journals keep."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.scorer = PromptScorer(self.vocab_size)
        self._prompts: dict[str, Prompt] = {}

    def update_requests(self, output: SchedulerOutput) -> None:
        """Apply a step's changes: what ended or is preempted leaves its row, what starts or goes on
        gets tokens and blocks."""
        kept = output.kept_states
        for req_id in output.finished_req_ids:
            self._remove(req_id, kept.get(req_id))
            self.scorer.forget(req_id)
            self._prompts.pop(req_id, None)
        for req_id in output.preempted_req_ids:
            self._remove(req_id, kept.get(req_id))
        for new in output.scheduled_new_reqs:
            assert new.sampling_params is not None
            prompt = Prompt(new.sampling_params, len(new.prompt_token_ids), self.placement)
            self._prompts[new.req_id] = prompt
            self._add(
                new.req_id, new.prompt_token_ids, prompt, new.num_computed_tokens, new.block_ids
            )
        cached = output.scheduled_cached_reqs
        if self.width > 1:
            self.batch.set_computed(
                cached.req_ids, cached.num_computed_tokens, output.decode_set_id
            )
        for i, block_ids in enumerate(cached.new_block_ids):
            if block_ids is None:
                continue
            req_id = cached.req_ids[i]
            if req_id in cached.resumed_req_ids:
                self._add(
                    req_id,
                    cached.all_token_ids[req_id],
                    self._prompts[req_id],
                    cached.num_computed_tokens[i],
                    block_ids,
                )
            else:
                self.block_tables.append_row(self.batch.requests[req_id].row, block_ids)
        for index, placed in self.placed.items():
            if placed.journals is not None:
                # A row that was left may be another placement's now.
                copies = output.copies_before if index == self.placement else ()
                placed.journals.before_copies(copies)

    def forget(self, output: SchedulerOutput) -> None:
        """Drop finished requests without running anything."""
        self.update_requests(output)

    def _add(
        self,
        req_id: str,
        token_ids: list[int],
        prompt: Prompt,
        num_computed_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        params = prompt.sampling_params
        state = self.batch.add(req_id, token_ids, prompt.num_tokens, params, num_computed_tokens)
        self.block_tables.set_row(state.row, block_ids)
        self.sampler.add(state)
        if self.drafter is not None:
            self.inputs.set_stops(state)
            self.drafter.add(state)

    def _remove(self, req_id: str, num_kept_tokens: int | None) -> None:
        state = self.batch.remove(req_id)
        if state is not None:
            journals = self.placed[self._prompts[req_id].placement].journals
            if journals is not None:
                journals.leave(state.row, num_kept_tokens)
        if state is not None and self.drafter is not None:
            self.drafter.remove(state)
        self.sampler.remove(req_id)
