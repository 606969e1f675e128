# SPDX-License-Identifier: Apache-2.0
"""From a step's order to the tensors the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.staging import StagedArray


@dataclass(frozen=True)
class StepInputs:
    """Device tensors of one step, and the host arrays other builders need.

    Decode-only steps may be padded: `num_padded` rows on the device, `num_tokens` real ones.

    `input_ids, positions [tokens]` int64; `sample_indices [n]`: token rows whose logits are
    sampled, `sample_rows [n]` their request rows, `sample_positions [n]` the sampled tokens'
    positions. `token_rows [tokens]` (host): request row of each token.
    """

    num_tokens: int
    num_padded: int
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: np.ndarray
    prefill_query_start_loc: Tensor
    prefill_query_start_loc_cpu: np.ndarray
    seq_lens: Tensor
    seq_lens_cpu: np.ndarray
    sample_indices: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    token_rows_cpu: np.ndarray
    positions_cpu: np.ndarray


class StepInputBuilder:
    """Fills staged arrays with numpy; no Python loop over tokens, no allocation on the device.

    `last_sampled [max_rows]` int64 holds on the device the newest token of every request: a token
    the host does not know yet is read from there.
    """

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device, depth: int) -> None:
        def staged(size: int, dtype: torch.dtype = torch.int64) -> StagedArray:
            return StagedArray((size,), dtype, device, depth)

        self.last_sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._ids, self._positions = staged(max_tokens), staged(max_tokens)
        self._query_start = staged(max_rows + 1, torch.int32)
        self._prefill_start = staged(max_rows + 1, torch.int32)
        self._seq_lens = staged(max_rows, torch.int32)
        self._source_tokens, self._source_rows = staged(max_rows), staged(max_rows)
        self._sample_indices, self._sample_rows = staged(max_rows), staged(max_rows)
        self._sample_positions = staged(max_rows)

    def build(self, order: StepOrder, padded_reqs: int | None = None) -> StepInputs:
        """`padded_reqs`: for a decode-only step, the requests (and tokens) to pad to."""
        n, counts = order.num_reqs, order.num_scheduled
        ends = np.cumsum(counts)
        starts = ends - counts
        total = int(counts.sum())
        padding = 0 if padded_reqs is None else padded_reqs - n
        request = np.repeat(np.arange(n), counts)
        positions = self._positions.next()
        np.add(np.arange(total) - starts[request], order.num_computed[request], positions[:total])
        query_start = self._query_start.next()
        query_start[0] = 0
        query_start[1 : n + 1] = ends
        query_start[n + 1 : n + 1 + padding] = np.arange(total + 1, total + 1 + padding)
        prefills = n - order.num_decodes
        prefill_start = self._prefill_start.next()
        prefill_start[0] = 0
        prefill_start[1 : prefills + 1] = ends[order.num_decodes :] - order.num_decodes
        seq_lens = self._seq_lens.next()
        seq_lens[:n] = order.num_computed + counts
        seq_lens[n : n + padding] = 0
        positions[total : total + padding] = 0
        input_ids = self._input_ids(order, starts, total, padding)
        sample_indices, sample_rows = self._sample_indices.next(), self._sample_rows.next()
        sample_positions = self._sample_positions.next()
        k = len(order.sampling)
        sample_indices[:k] = ends[order.sampling] - 1
        sample_rows[:k] = order.rows[order.sampling]
        sample_positions[:k] = seq_lens[order.sampling]
        return StepInputs(
            num_tokens=total,
            num_padded=total + padding,
            input_ids=input_ids,
            positions=self._positions.upload(total + padding),
            query_start_loc=self._query_start.upload(n + 1 + padding),
            query_start_loc_cpu=query_start[: n + 1],
            prefill_query_start_loc=self._prefill_start.upload(prefills + 1),
            prefill_query_start_loc_cpu=prefill_start[: prefills + 1],
            seq_lens=self._seq_lens.upload(n + padding),
            seq_lens_cpu=seq_lens[:n],
            sample_indices=self._sample_indices.upload(k),
            sample_rows=self._sample_rows.upload(k),
            sample_positions=self._sample_positions.upload(k),
            token_rows_cpu=order.rows[request],
            positions_cpu=positions[:total],
        )

    def _input_ids(self, order: StepOrder, starts: np.ndarray, total: int, padding: int) -> Tensor:
        ids = self._ids.next()
        ids[total : total + padding] = 0
        # Only a request's newest token can be unknown to the host.
        unknown = np.flatnonzero(order.num_computed + order.num_scheduled > order.num_known)
        self._source_tokens.next()[: len(unknown)] = (starts + order.num_scheduled - 1)[unknown]
        self._source_rows.next()[: len(unknown)] = order.rows[unknown]
        for i in np.flatnonzero(order.num_computed < order.num_known).tolist():
            start, first = int(starts[i]), int(order.num_computed[i])
            known = order.states[i].token_ids[first : first + int(order.num_scheduled[i])]
            ids[start : start + len(known)] = known
        device_ids = self._ids.upload(total + padding)
        if len(unknown):
            rows = self._source_rows.upload(len(unknown))
            newest = self.last_sampled.index_select(0, rows)
            device_ids.index_copy_(0, self._source_tokens.upload(len(unknown)), newest)
        return device_ids

    def padding(self, size: int) -> StepInputs:
        """A decode step of `size` padded rows, for graph capture."""
        nothing = np.zeros(0, dtype=np.int64)
        order = StepOrder([], [], nothing, nothing, nothing, nothing, 0, nothing)
        return self.build(order, size)

    def remember(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens just sampled (`rows, token_ids [n]`, device) for the next step."""
        self.last_sampled.index_copy_(0, rows, token_ids)
