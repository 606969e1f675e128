# SPDX-License-Identifier: Apache-2.0
"""From a step's order to the tensors the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.staging import StagedArray, Uploads


@dataclass(frozen=True)
class StepInputs:
    """Device tensors of one step, and the host arrays other builders need.

    A step that `replays` a graph is padded: `num_padded` tokens on the device, `num_tokens` real
    ones.
    The first `num_decode_rows` tokens are all that may be decodes: those that are, or as many as
    there can be where a graph is to run them.

    `input_ids, positions [tokens]` int64; `sample_indices [n]`: token rows whose logits are
    sampled, `sample_rows [n]` their request rows, `sample_positions [n]` the sampled tokens'
    positions. `token_rows [tokens]` (host): request row of each token. `source_tokens [m]`: tokens
    that the host does not know, `source_rows [m]` the request rows that sampled them.
    """

    num_tokens: int
    num_padded: int
    replays: bool
    num_decode_rows: int
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: np.ndarray
    prefill_query_start_loc: Tensor
    prefill_query_start_loc_cpu: np.ndarray
    seq_lens: Tensor
    seq_lens_cpu: np.ndarray
    prefill_seq_lens: Tensor
    sample_indices: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    token_rows_cpu: np.ndarray
    positions_cpu: np.ndarray
    source_rows: Tensor
    source_tokens: Tensor


class StepInputBuilder:
    """Fills staged arrays with numpy; no Python loop over tokens, no allocation on the device.

    `last_sampled [max_rows]` int64 holds on the device the newest token of every request: a token
    the host does not know yet is read from there.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
    ) -> None:
        def staged(size: int, dtype: torch.dtype = torch.int64) -> StagedArray:
            return StagedArray((size,), dtype, device, depth, uploads)

        self.last_sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._ids, self._positions = staged(max_tokens), staged(max_tokens)
        self._query_start = staged(max_rows + 1, torch.int32)
        self._prefill_start = staged(max_rows + 1, torch.int32)
        self._seq_lens = staged(max_rows, torch.int32)
        self._prefill_lens = staged(max_rows, torch.int32)
        self._source_tokens, self._source_rows = staged(max_rows), staged(max_rows)
        self._sample_indices, self._sample_rows = staged(max_rows), staged(max_rows)
        self._sample_positions = staged(max_rows)

    def build(
        self, order: StepOrder, padded_tokens: int | None = None, padded_reqs: int | None = None
    ) -> StepInputs:
        """`padded_tokens`: tokens to pad to; `padded_reqs`: requests to pad to, one token each (of
        a decode-only step, so both are the same number). Uploads wait for their flush, and ids that
        only the device knows for `read_newest`."""
        n, counts = order.num_reqs, order.num_scheduled
        ends = np.cumsum(counts)
        starts = ends - counts
        total = int(counts.sum())
        num_padded = total if padded_tokens is None else padded_tokens
        rows = n if padded_reqs is None else padded_reqs
        prefills, k = n - order.num_decodes, len(order.sampling)
        decode_rows = order.num_decodes
        if padded_tokens is not None:
            decode_rows = min(padded_tokens, len(self.last_sampled))
        request = np.repeat(np.arange(n), counts)
        positions = self._positions.next()
        np.add(np.arange(total) - starts[request], order.num_computed[request], positions[:total])
        positions[total:num_padded] = 0
        self._fill_requests(order, ends, rows)
        self._fill_samples(order, ends)
        num_unknown = self._fill_ids(order, starts)
        self._ids.array[total:num_padded] = 0
        return StepInputs(
            num_tokens=total,
            num_padded=num_padded,
            replays=padded_tokens is not None,
            num_decode_rows=decode_rows,
            input_ids=self._ids.upload(num_padded),
            positions=self._positions.upload(num_padded),
            query_start_loc=self._query_start.upload(rows + 1),
            query_start_loc_cpu=self._query_start.array[: n + 1],
            prefill_query_start_loc=self._prefill_start.upload(prefills + 1),
            prefill_query_start_loc_cpu=self._prefill_start.array[: prefills + 1],
            seq_lens=self._seq_lens.upload(rows),
            seq_lens_cpu=self._seq_lens.array[:n],
            prefill_seq_lens=self._prefill_lens.upload(prefills),
            sample_indices=self._sample_indices.upload(k),
            sample_rows=self._sample_rows.upload(k),
            sample_positions=self._sample_positions.upload(k),
            token_rows_cpu=order.rows[request],
            positions_cpu=positions[:total],
            source_rows=self._source_rows.upload(num_unknown),
            source_tokens=self._source_tokens.upload(num_unknown),
        )

    def read_newest(self, inputs: StepInputs) -> None:
        """Complete `input_ids` with tokens sampled before; the uploads are flushed by now."""
        if len(inputs.source_rows):
            newest = self.last_sampled.index_select(0, inputs.source_rows)
            inputs.input_ids.index_copy_(0, inputs.source_tokens, newest)

    def _fill_requests(self, order: StepOrder, ends: np.ndarray, padded_reqs: int) -> None:
        """Where each request's tokens start and how long it is; padded requests are empty."""
        n, decodes = order.num_reqs, order.num_decodes
        query_start = self._query_start.next()
        query_start[0] = 0
        query_start[1 : n + 1] = ends
        query_start[n + 1 : padded_reqs + 1] = np.arange(padded_reqs - n) + query_start[n] + 1
        prefill_start = self._prefill_start.next()
        prefill_start[0] = 0
        prefill_start[1 : n - decodes + 1] = ends[decodes:] - decodes
        seq_lens = self._seq_lens.next()
        seq_lens[:n] = order.num_computed + order.num_scheduled
        seq_lens[n:padded_reqs] = 0
        self._prefill_lens.next()[: n - decodes] = seq_lens[decodes:n]

    def _fill_samples(self, order: StepOrder, ends: np.ndarray) -> None:
        """Which tokens are sampled from, whose they are, and the positions of their successors."""
        k = len(order.sampling)
        self._sample_indices.next()[:k] = ends[order.sampling] - 1
        self._sample_rows.next()[:k] = order.rows[order.sampling]
        self._sample_positions.next()[:k] = self._seq_lens.array[order.sampling]

    def _fill_ids(self, order: StepOrder, starts: np.ndarray) -> int:
        """The ids the host knows, and where the device finds the others; how many these are."""
        ids = self._ids.next()
        # Only a request's newest token can be unknown to the host.
        unknown = np.flatnonzero(order.num_computed + order.num_scheduled > order.num_known)
        self._source_tokens.next()[: len(unknown)] = (starts + order.num_scheduled - 1)[unknown]
        self._source_rows.next()[: len(unknown)] = order.rows[unknown]
        for i in np.flatnonzero(order.num_computed < order.num_known).tolist():
            start, first = int(starts[i]), int(order.num_computed[i])
            known = order.states[i].token_ids[first : first + int(order.num_scheduled[i])]
            ids[start : start + len(known)] = known
        return len(unknown)

    def padding(self, num_tokens: int, num_reqs: int) -> StepInputs:
        """A step of padded tokens and requests, for graph capture."""
        nothing = np.zeros(0, dtype=np.int64)
        order = StepOrder([], [], nothing, nothing, nothing, nothing, 0, nothing)
        return self.build(order, num_tokens, num_reqs)

    def remember(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens just sampled (`rows, token_ids [n]`, device) for the next step.

        A request without a token to sample is at its end; its next step, if there is one, computes
        something that nobody reads.
        """
        self.last_sampled.index_copy_(0, rows, token_ids.clamp(min=0))
