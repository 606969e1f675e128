# SPDX-License-Identifier: Apache-2.0
"""The adjustments of one step, applied to all its rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.sampling.adjustment_fields import Field
from vllm.utils.torch_utils import to_device
from vllm.v1.sample.adjustments import Adjustments

#: (row of the logits, its adjustments, output tokens so far)
AdjustedRow = tuple[int, Adjustments, int]


class AdjustedRows(Protocol):
    """Changes the logits of a step and notes what was sampled from them."""

    def change(self, logits: Tensor, keep: bool) -> Tensor:
        """The changed `logits [n, vocab]`, in place unless `keep` or the dtype is too narrow."""
        ...

    def observe(self, token_ids: Tensor) -> None:
        """Take note of the sampled `token_ids [n]` int64."""
        ...


def adjusted_rows(rows: Sequence[AdjustedRow], device: torch.device) -> AdjustedRows | None:
    """The `rows` that change anything in this step; None without any."""
    acting = [row for row in rows if row[1].acts(row[2])]
    if not acting:
        return None
    return DeviceRows.upload(acting, device) if device.type == "cuda" else HostRows(acting)


@dataclass(frozen=True)
class HostRows:
    """One row after the other, in torch."""

    rows: list[AdjustedRow]

    def change(self, logits: Tensor, keep: bool) -> Tensor:
        logits = logits.to(torch.float32, copy=keep)
        for row, adjustments, num_output_tokens in self.rows:
            adjustments.apply(logits[row], num_output_tokens)
        return logits

    def observe(self, token_ids: Tensor) -> None:
        for row, adjustments, _ in self.rows:
            adjustments.observe(token_ids[row : row + 1])


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
        table = np.concatenate([adjustments.descriptor for _, adjustments, _ in rows])
        table = table.reshape(len(rows), len(Field))
        table[:, Field.ROW] = [row for row, _, _ in rows]
        table[:, Field.NUM_BANNED] *= [a.bars_stop(count) for _, a, count in rows]
        counted, worded = table[:, Field.MARKS] != 0, table[:, Field.NUM_WORDS] > 0
        return cls(
            rows,
            rows[0][1].vocab_size,
            to_device(torch.from_numpy(table), device),
            changes_values=bool((counted | (table[:, Field.BIAS] != 0)).any()),
            bans=bool((worded | (table[:, Field.NUM_BANNED] > 0)).any()),
            observes=bool((counted | worded).any()),
        )

    def change(self, logits: Tensor, keep: bool) -> Tensor:
        from vllm.kernels.sampling.adjust import ban_tokens, change_logits

        if self.changes_values:
            order = np.full(len(logits), -1, dtype=np.int32)
            order[[row for row, _, _ in self.rows]] = np.arange(len(self.rows))
            on_device = to_device(torch.from_numpy(order), logits.device)
            logits = change_logits(logits, self.descriptors, on_device)
        elif keep:
            logits = logits.clone()
        if self.bans:
            ban_tokens(logits, self.descriptors)
        return logits

    def observe(self, token_ids: Tensor) -> None:
        from vllm.kernels.sampling.adjust import observe_tokens

        if self.observes:
            observe_tokens(token_ids, self.descriptors, self.vocab_size)
