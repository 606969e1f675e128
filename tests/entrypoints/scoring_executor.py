# SPDX-License-Identifier: Apache-2.0
"""A model that costs nothing and scores tokens, too."""

from __future__ import annotations

import numpy as np

from benchmarks.token_source import TokenExecutor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput


class ScoringExecutor(TokenExecutor):
    """`TokenExecutor` with the logprobs that requests ask for; their ids are arbitrary, so that
    many texts are new to the front end."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._params: dict[str, SamplingParams] = {}

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super()._execute(output)
        for new in output.scheduled_new_reqs:
            self._params[new.req_id] = new.sampling_params
            if new.sampling_params.prompt_logprobs is not None and (
                targets := new.prompt_token_ids[1:]
            ):
                # A prompt is computed in one step.
                result.prompt_logprobs[new.req_id] = self._scores(
                    targets, new.sampling_params.prompt_logprobs
                )
        for req_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            asked = self._params[req_id].logprobs
            if tokens and asked is not None:
                result.logprobs[req_id] = self._scores(tokens, asked)
        for req_id in output.finished_req_ids:
            self._params.pop(req_id, None)
        return result

    def _scores(self, tokens: list[int], k: int) -> LogprobsLists:
        actual = np.array(tokens, dtype=np.int32)[:, None]
        ids = (actual + np.arange(k + 1, dtype=np.int32) * 97) % self._vocab_size
        values = np.broadcast_to(-np.arange(k + 1, dtype=np.float32), ids.shape)
        return LogprobsLists(ids, values.copy(), np.ones(len(tokens), dtype=np.int32))
