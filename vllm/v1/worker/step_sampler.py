# SPDX-License-Identifier: Apache-2.0
"""The sampling part of a step, and what it keeps of each request from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import torch
from torch import Tensor, nn

from vllm.kernels.step import Progress
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import RequestError, RequestFailure
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.adjusted_rows import AdjustedRow, AdjustedRows, adjusted_rows
from vllm.v1.sample.adjustments import Adjustments
from vllm.v1.sample.metadata import MOST_BEST, SamplingMetadata
from vllm.v1.sample.sampler import sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.sample.vocab_shard import VocabShard
from vllm.v1.worker.input_batch import RequestState, StepOrder

logger = init_logger(__name__)

#: a step's width, its decodes, the ids of the requests that sample
_Key = tuple[int, int, list[str]]


class StepSampler:
    """Holds the adjustments of requests that ask for some, and the metadata of the last steps'
    requests, `num_sets` that take turns, which serves again while these stay the same."""

    def __init__(
        self, vocab_size: int, device: torch.device, progress: Progress, num_sets: int = 1
    ) -> None:
        #: of whose vocabulary this rank has a part, None: it has the whole
        self.shard: VocabShard | None = None
        self._vocab_size = vocab_size
        self._device = device
        self._progress = progress
        #: the rows with adjustments of the step whose output is not known yet
        self._adjusted: AdjustedRows | None = None
        self._adjustments: dict[str, Adjustments] = {}
        self._metadata: deque[tuple[_Key, SamplingMetadata]] = deque(maxlen=num_sets)
        self._failed: dict[str, RequestError] = {}

    def share_vocabulary(self, model: nn.Module) -> None:
        """From here on sample from this rank's part of what the model's head gives, if it can."""
        why = (
            "ranks exchange their best tokens; logits are gathered for requests with top_p and no"
            f" top_k up to {MOST_BEST}, and for more than {MOST_BEST} logprobs"
        )
        self.shard = VocabShard.of_model(model, "logits of several ranks", why)

    def add(self, state: RequestState) -> None:
        """A request has its row, with the tokens that the host knows. It fails, and nothing else,
        if its adjustments cannot be made."""
        params = state.sampling_params
        if not Adjustments.needed(params):
            return
        try:
            self._adjustments[state.req_id] = Adjustments(
                params, state.token_ids, state.num_prompt_tokens, self._vocab_size, self._device
            )
        except Exception as error:
            logger.exception("sampling of request %s cannot be prepared", state.req_id)
            self._failed[state.req_id] = RequestFailure.of("prepare", error)

    def take_failed(self) -> dict[str, RequestError]:
        """The requests that failed since the last call; what was sampled for them is nothing."""
        failed, self._failed = self._failed, {}
        return failed

    def remove(self, req_id: str) -> None:
        """A request has lost its row; one of the same id may have other parameters."""
        self._adjustments.pop(req_id, None)
        self._metadata.clear()

    def sample(
        self,
        order: StepOrder,
        logits: Tensor,
        positions: Tensor,
        masks: TokenMasks | None,
    ) -> SamplerOutput | None:
        """Tokens of the requests that sample, from `logits [n, vocab]`, or this rank's part of
        them, for `positions [n]`; None if there are none. The adjustments of a row after drafts
        are those after these drafts.
        """
        self._adjusted = None
        if not len(order.sampling):
            return None
        adjusted = self._rows_with_adjustments(order) if self._adjustments else []
        try:
            return self._sample(logits, self._metadata_of(order), positions, adjusted, masks)
        except Exception as error:
            culprits = self._culprits(order, adjusted, error)
            if not culprits:
                raise
            # Rows are looked at before any is changed, so these are as the model made them.
            metadata = SamplingMetadata.build(
                self._params_of(order, culprits), self._vocab_size, self._device
            )
            starts = order.sample_starts
            adjusted = [one for one in adjusted if int(starts[one.request]) not in culprits]
            return self._sample(logits, metadata, positions, adjusted, masks)

    def observe(self, token_ids: Tensor, counts: Tensor) -> None:
        """What is output of the sampled `token_ids [n]`: `counts [k]` int32 of each request that
        sampled, from its first row on."""
        if self._adjusted is not None:
            self._adjusted.observe(token_ids, counts)

    def _sample(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        positions: Tensor,
        rows: list[AdjustedRow],
        masks: TokenMasks | None,
    ) -> SamplerOutput:
        self._adjusted = adjusted_rows(rows, self._device)
        return sample(logits, metadata, positions, self._adjusted, masks, self.shard)

    def _rows_with_adjustments(self, order: StepOrder) -> list[AdjustedRow]:
        rows: list[AdjustedRow] = []
        starts, counts = order.sample_starts.tolist(), order.num_samples.tolist()
        for i, state in enumerate(order.sampled.states):
            adjustments = self._adjustments.get(state.req_id)
            if adjustments is None:
                continue
            drafts = self._progress.tokens[state.row, 1:] if counts[i] > 1 else None
            known = state.num_output_tokens
            rows += [
                AdjustedRow(starts[i] + j, adjustments, known + j, i, j, drafts)
                for j in range(counts[i])
            ]
        return rows

    def _culprits(
        self, order: StepOrder, adjusted: list[AdjustedRow], error: Exception
    ) -> set[int]:
        """First rows of requests that cannot be sampled even alone: these fail."""
        rows = {one.row: [one] for one in adjusted}
        culprits = set()
        for row, state in zip(order.sample_starts.tolist(), order.sampled.states, strict=True):
            try:
                SamplingMetadata.build([state.sampling_params], self._vocab_size, self._device)
                adjusted_rows(rows.get(row, []), self._device)
            except Exception:
                logger.error("request %s cannot be sampled", state.req_id, exc_info=error)
                self._failed[state.req_id] = RequestFailure.of("sample", error)
                culprits.add(row)
        return culprits

    @staticmethod
    def _params_of(order: StepOrder, culprits: Collection[int] = ()) -> list[SamplingParams]:
        """Of each row; greedy for the rows of requests whose first is among `culprits`."""
        greedy = SamplingParams(temperature=0.0)
        params: list[SamplingParams] = []
        starts, counts = order.sample_starts.tolist(), order.num_samples.tolist()
        for start, count, state in zip(starts, counts, order.sampled.states, strict=True):
            params += [greedy if start in culprits else state.sampling_params] * count
        return params

    def _metadata_of(self, order: StepOrder) -> SamplingMetadata:
        decodes = int((order.sampling < order.num_decodes).sum())
        key = (order.width, decodes, order.sampled.req_ids)
        for known, metadata in self._metadata:
            if known == key:
                return metadata
        metadata = SamplingMetadata.build(self._params_of(order), self._vocab_size, self._device)
        self._metadata.append((key, metadata))
        return metadata
