# SPDX-License-Identifier: Apache-2.0
"""The adjustments of one step, applied to all its rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.sampling.adjustment_fields import Field
from vllm.utils.torch_utils import to_device
from vllm.v1.sample.adjustments import Adjustments


class AdjustedRow(NamedTuple):
    """A row of the logits of a request with adjustments.

    At least `num_output_tokens` of the request were sampled before this step; `request` counts
    the requests that sample in it. A row after drafts that are verified follows the first
    `num_before` of `drafts [n]` int64, a view of the device's that other steps will overwrite.
    """

    row: int
    adjustments: Adjustments
    num_output_tokens: int
    request: int = 0
    num_before: int = 0
    drafts: Tensor | None = None


class AdjustedRows(Protocol):
    """Changes the logits of a step and notes what was output."""

    def change(self, logits: Tensor, positions: Tensor, keep: bool, first: int = 0) -> Tensor:
        """The changed `logits [n, tokens]`, of the vocabulary's tokens from `first` on, in place
        unless `keep` or the dtype is too narrow; `positions [n]` int64 of the tokens to sample."""
        ...

    def observe(self, token_ids: Tensor, counts: Tensor) -> None:
        """Take note of what is output of the sampled `token_ids [n]` int64: `counts [k]` int32 of
        each request that sampled."""
        ...


def adjusted_rows(rows: Sequence[AdjustedRow], device: torch.device) -> AdjustedRows | None:
    """The `rows` that change anything in this step; None without any."""
    acting = [row for row in rows if row.adjustments.acts(row.num_output_tokens)]
    if not acting:
        return None
    return DeviceRows.upload(acting, device) if device.type == "cuda" else HostRows(acting)


@dataclass(frozen=True)
class HostRows:
    """One row after the other, in torch."""

    rows: list[AdjustedRow]

    def change(self, logits: Tensor, positions: Tensor, keep: bool, first: int = 0) -> Tensor:
        logits = logits.to(torch.float32, copy=keep)
        for row in self.rows:
            drafts = None if row.drafts is None else row.drafts[: row.num_before]
            row.adjustments.apply(logits[row.row], int(positions[row.row]), drafts, first)
        return logits

    def observe(self, token_ids: Tensor, counts: Tensor) -> None:
        for row in self.rows:
            if row.num_before == 0:
                output = token_ids[row.row : row.row + int(counts[row.request])]
                row.adjustments.observe(output)


@dataclass(frozen=True)
class DeviceRows:
    """All rows in one launch per kind of change; see `Field` for the `descriptors [m, fields]`.

    `changes_values`, `bans`, `observes`: whether any row needs that kind at all.
    """

    rows: list[AdjustedRow]
    vocab_size: int
    descriptors: Tensor
    changes_values: bool
    bans: bool
    observes: bool

    @classmethod
    def upload(cls, rows: list[AdjustedRow], device: torch.device) -> DeviceRows:
        table = np.concatenate([row.adjustments.descriptor for row in rows])
        table = table.reshape(len(rows), len(Field))
        table[:, Field.ROW] = [row.row for row in rows]
        table[:, Field.REQUEST] = [row.request for row in rows]
        table[:, Field.NUM_BEFORE] = [row.num_before for row in rows]
        table[:, Field.DRAFTS] = [0 if r.drafts is None else r.drafts.data_ptr() for r in rows]
        table[:, Field.NUM_BANNED] *= [r.adjustments.bars_stop(r.num_output_tokens) for r in rows]
        counted, worded = table[:, Field.MARKS] != 0, table[:, Field.NUM_WORDS] > 0
        return cls(
            rows,
            rows[0].adjustments.vocab_size,
            to_device(torch.from_numpy(table), device),
            changes_values=bool((counted | (table[:, Field.BIAS] != 0)).any()),
            bans=bool((worded | (table[:, Field.NUM_BANNED] > 0)).any()),
            observes=bool((counted | worded).any()),
        )

    def change(self, logits: Tensor, positions: Tensor, keep: bool, first: int = 0) -> Tensor:
        from vllm.kernels.sampling.adjust import ban_tokens, change_logits

        if self.changes_values:
            order = np.full(len(logits), -1, dtype=np.int32)
            order[[row.row for row in self.rows]] = np.arange(len(self.rows))
            on_device = to_device(torch.from_numpy(order), logits.device)
            logits = change_logits(logits, self.descriptors, on_device, first)
        elif keep:
            logits = logits.clone()
        if self.bans:
            ban_tokens(logits, self.descriptors, positions, first)
        return logits

    def observe(self, token_ids: Tensor, counts: Tensor) -> None:
        from vllm.kernels.sampling.adjust import observe_tokens

        if self.observes:
            observe_tokens(token_ids, counts, self.descriptors, self.vocab_size)
