# SPDX-License-Identifier: Apache-2.0
"""From a step's order to the tensors the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.step import (
    AcceptProblem,
    JournalCommits,
    PagedGroups,
    PrepareProblem,
    Progress,
    accept,
    prepare,
)
from vllm.kernels.step.problem import ACCEPT_COUNT, COLUMNS, NEVER_ENDS, ON_DEVICE, STOPS
from vllm.utils.torch_utils import to_device
from vllm.v1.worker.input_batch import RequestState, StepOrder
from vllm.v1.worker.staging import StagedArray, Uploads


@dataclass(frozen=True)
class StepInputs:
    """Device tensors of one step, and the host arrays other builders need.

    A step that `replays` a graph is padded: `num_padded` tokens on the device, of which
    `num_tokens` are requests'. The first `num_decode_rows * width` tokens are all that may be
    decodes: those that are, or as many as there can be where a graph is to run them.

    `input_ids, positions, next_positions [tokens]` int64, `requests [requests, 4]` int32 and
    `seq_lens [requests]` int32: see `PrepareProblem`; `seq_lens_cpu` are upper bounds.
    `sample_indices [n]`: token rows whose logits are sampled; `sample_requests [k, 4]` int32: see
    `AcceptProblem`.
    """

    num_tokens: int
    num_padded: int
    width: int
    replays: bool
    num_decode_rows: int
    input_ids: Tensor
    positions: Tensor
    next_positions: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: np.ndarray
    prefill_query_start_loc: Tensor
    prefill_query_start_loc_cpu: np.ndarray
    requests: Tensor
    seq_lens: Tensor
    seq_lens_cpu: np.ndarray
    prefill_seq_lens: Tensor
    sample_indices: Tensor
    sample_requests: Tensor


class StepInputBuilder:
    """Fills staged arrays with numpy, one entry per request; `prepare` makes the tokens' arrays on
    the device, where `progress` keeps what only the device knows."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
        width: int = 1,
        max_model_len: int = 2**31 - 1,
        ends_rows: bool = False,
    ) -> None:
        def staged(*shape: int, dtype: torch.dtype = torch.int32) -> StagedArray:
            return StagedArray(shape, dtype, device, depth, uploads)

        def filled(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.progress = Progress.create(max_rows, width, device)
        #: tokens of a step, a decode's padding included
        self.max_tokens = max_tokens + max_rows * (width - 1)
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._ends_rows = ends_rows
        self._ids = staged(self.max_tokens, dtype=torch.int64)
        self._query_start = staged(max_rows + 1)
        self._prefill_start = staged(max_rows + 1)
        self._requests = staged(max_rows, COLUMNS)
        self._prefill_lens = staged(max_rows)
        self._sample_indices = staged(max_rows * width, dtype=torch.int64)
        self._sample_requests = staged(max_rows, COLUMNS)
        self._positions = filled(self.max_tokens)
        self._next_positions = filled(self.max_tokens)
        self._seq_lens = filled(max_rows, torch.int32)
        self._counts = torch.zeros(2, max_rows, dtype=torch.int32, device=device)

    def build(
        self,
        order: StepOrder,
        padded_tokens: int | None = None,
        padded_reqs: int | None = None,
        journals: bool = False,
    ) -> StepInputs:
        """`padded_tokens`: tokens to pad to; `padded_reqs`: requests to pad to, of a decode-only
        step. `journals`: whether decodes leave their tokens in one. Uploads wait for their flush,
        and what follows from them for `prepare`."""
        n, decodes, width = order.num_reqs, order.num_decodes, order.width
        lengths = order.lengths
        ends = np.cumsum(lengths)
        starts = ends - lengths
        total = int(lengths.sum())
        num_padded = total if padded_tokens is None else padded_tokens
        rows = n if padded_reqs is None else padded_reqs
        decode_rows = decodes
        if padded_tokens is not None:
            decode_rows = min(padded_tokens // width, self._max_rows)
        seq_lens = order.num_computed + lengths
        self._fill_requests(order, starts, ends, rows)
        self._prefill_lens.next()[: n - decodes] = seq_lens[decodes:]
        num_samples = self._fill_samples(order, starts, journals)
        self._fill_ids(order, starts)
        k, prefills = len(order.sampling), n - decodes
        return StepInputs(
            num_tokens=total,
            num_padded=num_padded,
            width=width,
            replays=padded_tokens is not None,
            num_decode_rows=decode_rows,
            input_ids=self._ids.upload(num_padded),
            positions=self._positions[:num_padded],
            next_positions=self._next_positions[:num_padded],
            query_start_loc=self._query_start.upload(rows + 1),
            query_start_loc_cpu=self._query_start.array[: n + 1],
            prefill_query_start_loc=self._prefill_start.upload(prefills + 1),
            prefill_query_start_loc_cpu=self._prefill_start.array[: prefills + 1],
            requests=self._requests.upload(rows),
            seq_lens=self._seq_lens[:rows],
            seq_lens_cpu=seq_lens,
            prefill_seq_lens=self._prefill_lens.upload(prefills),
            sample_indices=self._sample_indices.upload(num_samples),
            sample_requests=self._sample_requests.upload(k),
        )

    def prepare(
        self,
        order: StepOrder,
        inputs: StepInputs,
        groups: PagedGroups,
        journal: JournalCommits | None = None,
    ) -> None:
        """Make the tokens' arrays; the uploads are flushed by now."""
        prepare(
            PrepareProblem(
                progress=self.progress,
                requests=inputs.requests,
                num_requests=order.num_reqs,
                num_decodes=order.num_decodes,
                width=inputs.width,
                num_tokens=inputs.num_tokens,
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                next_positions=inputs.next_positions,
                seq_lens=inputs.seq_lens,
                max_model_len=self._max_model_len,
                groups=groups,
                journal=journal,
            )
        )

    def limit_samples(
        self, sample_requests: Tensor, places: np.ndarray, counts: Sequence[int]
    ) -> None:
        """Of the requests at `places [n]` of a step's `sample_requests` only the first `counts [n]`
        samples count, as many as have masks: no draft after them is accepted."""
        limits = to_device(torch.from_numpy(np.stack([places, counts])), sample_requests.device)
        column = sample_requests[:, ACCEPT_COUNT]
        column.index_copy_(0, limits[0], limits[1].to(column.dtype))

    def accept_requests(self, sample_requests: Tensor, sampled: Tensor) -> Tensor:
        """Advance the rows by what was `sampled [samples]` in a step with these `sample_requests`;
        `[2, k]` int32: how many samples of each are output, and how many drafts were verified."""
        counts = self._counts[:, : len(sample_requests)]
        ends = self._ends_rows
        accept(AcceptProblem(self.progress, sample_requests, sampled, counts, ends))
        return counts

    def set_stops(self, state: RequestState) -> None:
        """Tell the device which tokens end a request's output, as many as it has room for, and
        whether they do in any step."""
        params = state.sampling_params
        ids = sorted(params.ending_token_ids)[:STOPS]
        stops = torch.tensor(ids + [-1] * (STOPS - len(ids)))
        if self.progress.stops.is_cuda:
            stops = stops.pin_memory()
        self.progress.stops[state.row].copy_(stops, non_blocking=True)
        self.progress.ended[state.row].fill_(0 if params.device_stop_ids else NEVER_ENDS)

    def _fill_requests(
        self, order: StepOrder, starts: np.ndarray, ends: np.ndarray, padded_reqs: int
    ) -> None:
        """Where each request's tokens start; padded requests are empty."""
        n, decodes = order.num_reqs, order.num_decodes
        query_start = self._query_start.next()
        query_start[0] = 0
        query_start[1 : n + 1] = ends
        padding = np.arange(1, padded_reqs - n + 1) * order.width
        query_start[n + 1 : padded_reqs + 1] = query_start[n] + padding
        prefill_start = self._prefill_start.next()
        prefill_start[0] = 0
        prefill_start[1 : n - decodes + 1] = ends[decodes:] - decodes * order.width
        table = self._requests.next()
        # Past what the host knows, only the device knows how far a request is.
        unknown = order.num_computed >= order.num_known
        table[:n, 0] = order.rows
        table[:n, 1] = np.where(unknown, ON_DEVICE, order.num_computed)
        table[:n, 2] = order.num_scheduled
        table[:n, 3] = starts
        table[n:padded_reqs] = (-1, 0, 0, 0)

    def _fill_samples(self, order: StepOrder, starts: np.ndarray, journals: bool) -> int:
        """Which tokens are sampled from, whose they are; how many."""
        sampling = order.sampling
        k = len(sampling)
        decodes = sampling < order.num_decodes
        counts, begins = order.num_samples, order.sample_starts
        total = int(counts.sum())
        firsts = starts[sampling] + np.where(decodes, 0, order.num_scheduled[sampling] - 1)
        offsets = np.arange(total) - np.repeat(begins, counts)
        self._sample_indices.next()[:total] = np.repeat(firsts, counts) + offsets
        table = self._sample_requests.next()
        table[:k, 0] = order.rows[sampling]
        table[:k, 1] = begins
        table[:k, 2] = np.where(decodes, order.num_scheduled[sampling], 1)
        table[:k, 3] = decodes & journals
        return total

    def _fill_ids(self, order: StepOrder, starts: np.ndarray) -> None:
        """The ids the host knows; `prepare` reads the others from the device."""
        ids = self._ids.next()
        for i in np.flatnonzero(order.num_computed < order.num_known).tolist():
            start, first = int(starts[i]), int(order.num_computed[i])
            known = order.states[i].token_ids[first : first + int(order.num_scheduled[i])]
            ids[start : start + len(known)] = known

    def padding(
        self, num_tokens: int, num_reqs: int, width: int = 1
    ) -> tuple[StepOrder, StepInputs]:
        """A step of padded tokens and requests, for graph capture."""
        nothing = np.zeros(0, dtype=np.int64)
        order = StepOrder([], [], nothing, nothing, nothing, nothing, 0, nothing, width=width)
        return order, self.build(order, num_tokens, num_reqs)
