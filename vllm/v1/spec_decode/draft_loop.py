# SPDX-License-Identifier: Apache-2.0
"""Draft layers run after a step: some rows per request, at a time or in turn, on the device.

Positions, lengths and slots follow from what the device knows of each row, in tensors that stay at
their address: the host counts steps and requests, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.forward_context import ForwardContext
from vllm.kernels.step import Progress
from vllm.kernels.step.problem import ROW
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.state_layers import modules_in_use
from vllm.v1.spec_decode.drafter import DrafterMemory
from vllm.v1.worker.step_inputs import StepInputs


def layer_names(model: nn.Module) -> list[str]:
    """Of the layers of a draft model that keep state, of a supernet those in use."""
    modules = (module for _, module in modules_in_use(model))
    return [module.layer_name for module in modules if isinstance(module, AttentionLayerBase)]


@dataclass(frozen=True)
class _Group:
    """A state group of draft layers: `table [rows, blocks]` int32 of the step's requests, `places`
    of their next tokens: `[rows * width]` int64 slots, or `[rows]` int32 blocks of their states."""

    table: Tensor
    block_size: int
    places: Tensor
    is_recurrent: bool


class DraftLoop:
    """Places `width` tokens of each request at a time. Call `begin` after each step, then `place`
    before the tokens, inside whose context the layers run."""

    def __init__(self, progress: Progress, max_model_len: int, width: int = 1) -> None:
        self._progress = progress
        self._max_model_len = max_model_len
        self._width = width
        rows, device = len(progress.tokens), progress.tokens.device

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        #: `[rows * width]` int64: where each request's tokens lie
        self.positions = zeros(torch.int64, rows * width)
        self._ahead = torch.arange(width, device=device)
        self._seq_lens = zeros(torch.int32, rows)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
        #: of each row its drafts, zeros, and at last how many drafts there are; the last row takes
        #: what belongs to no request
        self._drafts = zeros(torch.int64, rows + 1, progress.width)
        #: `[width, rows]`: each number up to the most drafts, for all rows
        self._numbers = torch.arange(progress.width, device=device).repeat(rows, 1).t().contiguous()
        self._groups: dict[int, _Group] = {}
        self._names: list[str] = []

    def bind(self, memory: DrafterMemory, layer_names: Sequence[str]) -> None:
        """The layers have got their memory."""
        self._names, self._memory = list(layer_names), memory
        self._groups.clear()
        for index, group in enumerate(memory.kv_cache_config.kv_cache_groups):
            if not set(group.layer_names).isdisjoint(layer_names):
                table, spec = memory.block_tables.groups[index].paged, group.kv_cache_spec
                places = self._seq_lens if spec.is_recurrent else self.positions
                self._groups[index] = _Group(
                    table.block_table,
                    table.block_size,
                    torch.zeros_like(places),
                    spec.is_recurrent,
                )

    def begin(self, inputs: StepInputs, num_reqs: int) -> DraftRows:
        """Of the first `num_reqs` requests of the step, all sampling or not."""
        rows = inputs.requests[:num_reqs, ROW].long()
        is_real = rows >= 0
        computed = self._progress.computed.index_select(0, rows.clamp(min=0)).long()
        starts = inputs.query_start_loc[:num_reqs].long()
        ends = inputs.query_start_loc[1 : num_reqs + 1].long()
        # A row of tokens past the model's length has no position, and one of padding no token; no
        # draft of it is used.
        first = inputs.positions.index_select(0, starts)
        newest = starts + (computed - 1 - first).clamp(min=0)
        last = torch.minimum(newest, ends - 1).clamp(min=0)
        return DraftRows(rows, is_real, computed, last, self._context(num_reqs))

    def _context(self, num_reqs: int) -> ForwardContext:
        slots, blocks = {}, {}
        for index, group in self._groups.items():
            if group.is_recurrent:
                blocks[index] = group.places[:num_reqs]
            else:
                slots[index] = group.places[: num_reqs * self._width]
        starts, lengths = self._starts[: num_reqs + 1], self._seq_lens[:num_reqs]
        return self._memory.metadata.of_draft_tokens(
            self._names, starts, lengths, slots, blocks, self._width
        )

    def place(self, rows: DraftRows, ahead: int) -> Tensor:
        """The rows' next tokens lie `ahead` after those that are computed; `[rows * width]` int64
        positions of them. Where they do not end before the model's length, none is computed."""
        count, width = len(rows.rows), self._width
        first = rows.computed + ahead
        inside = rows.is_real & (first + width <= self._max_model_len)
        first = torch.where(inside, first, 0)
        self._seq_lens[:count] = torch.where(inside, first + width, 0)
        position = first.unsqueeze(1) + self._ahead
        self.positions[: count * width] = position.flatten()
        for group in self._groups.values():
            if group.is_recurrent:
                group.places[:count] = torch.where(inside, group.table[:count, 0], -1)
                continue
            block = group.table[:count].gather(1, position // group.block_size).long()
            slot = block * group.block_size + position % group.block_size
            held = inside.unsqueeze(1) & (block > 0)
            group.places[: count * width] = torch.where(held, slot, -1).flatten()
        return self.positions[: count * width]

    def keep(self, rows: DraftRows, drafts: Sequence[Tensor]) -> Tensor:
        """`drafts`, each `[rows]` int64, are what the rows' next step verifies; returned as
        `[rows, drafts]`. Rows that had no part in the step keep theirs, which may be others and
        more or fewer."""
        spare, count = len(self._drafts) - 1, len(drafts)
        where = torch.where(rows.is_real, rows.rows, spare)
        numbers = self._numbers[:, : len(where)]
        nothing = [numbers[0]] * (self._progress.width - 1 - count)
        found = torch.stack([*drafts, *nothing, numbers[count]], dim=1)
        self._drafts.index_copy_(0, where, found)
        self._progress.tokens[:, 1:] = self._drafts[:-1, :-1]
        self._progress.num_drafts.copy_(self._drafts[:-1, -1])
        return found[:, :count]

    @property
    def spare(self) -> Tensor:
        """The row that drafts for padding go to."""
        return self._drafts[-1:]

    def keep_none(self) -> None:
        """The next step of no row verifies any."""
        self._drafts.zero_()
        self._progress.num_drafts.zero_()


@dataclass(frozen=True)
class DraftRows:
    """A step's requests, all `[n]`: batch row (-1: padding), tokens computed, and the place among
    the step's tokens of the last of these. `context`: what layers see of one token per request."""

    rows: Tensor
    is_real: Tensor
    computed: Tensor
    last: Tensor
    context: ForwardContext
