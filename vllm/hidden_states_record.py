# SPDX-License-Identifier: Apache-2.0
"""A request's captured hidden states as one sealed run of bytes, on their way to a trainer.

The bytes: request id, token ids (int64), rows, scales if there are any. XXH3-64 seals them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import xxhash
from torch import Tensor

from vllm.hidden_states_storage import RowFormat, StoredRows

#: what happens to rows that find no room: they wait, they go, or the oldest unread ones go
Policy = Literal["wait", "drop_new", "drop_oldest"]
POLICIES: tuple[Policy, ...] = ("wait", "drop_new", "drop_oldest")


class RowsBroken(RuntimeError):
    """The engine died, or bytes that arrive are not those that it wrote."""


@dataclass(frozen=True)
class Rows:
    """`token_ids [n]` int64 and `hidden_states [n, columns, hidden]` of one request.

    With `scales`, fp32 `[n, columns, 1]`, the hidden states are as they are stored: float8_e4m3fn.
    """

    request_id: str
    token_ids: Tensor
    hidden_states: Tensor
    scales: Tensor | None = None


class RowWriter(Protocol):
    """Where an engine puts records, from one thread."""

    def put(self, rows: Rows, policy: Policy, stopped: Callable[[], bool]) -> bool:
        """False if they were dropped: there is no room and `policy` says so, or `stopped` while
        they wait for it."""

    @property
    def num_dropped(self) -> int: ...

    def close(self) -> None:
        """Nothing is put any more: readers get what is left, and then the end."""


def data_bytes(num_rows: int, row_bytes: int, id_bytes: int) -> int:
    """Of a record with rows of `row_bytes` each."""
    return id_bytes + num_rows * (8 + row_bytes)


def check(rows: Rows, row_format: RowFormat, where: str) -> None:
    """ValueError, which names `where` they were to go, unless every token has one row of this
    format."""
    stored = StoredRows(rows.hidden_states, rows.scales)
    if problem := row_format.problem(stored, len(rows.token_ids)):
        raise ValueError(f"not rows of this {where}: {problem}")


def parts(rows: Rows) -> list[memoryview]:
    """The record's bytes, in order."""
    stored = StoredRows(rows.hidden_states, rows.scales)
    tensors = (rows.token_ids, *stored.tensors.values())
    return [memoryview(rows.request_id.encode()), *map(bytes_of, tensors)]


def write_sealed(
    data: Iterable[memoryview], at: int, write: Callable[[int, memoryview], None]
) -> int:
    """Write a record's parts one after the other, from `at` on; its seal."""
    sealed = xxhash.xxh3_64()
    for part in data:
        write(at, part)
        sealed.update(part)
        at += len(part)
    return sealed.intdigest()


def damage(data: bytearray, sealed: int) -> str | None:
    """What is wrong with a record that arrived; None if it is what was written."""
    if (found := xxhash.xxh3_64_intdigest(data)) != sealed:
        return f"a record was sealed with {sealed:016x}, arrived with {found:016x}"
    return None


def decode(data: bytearray, id_bytes: int, num_rows: int, row_format: RowFormat, raw: bool) -> Rows:
    """An undamaged record's rows, in the model's dtype; with `raw` as they are stored."""
    tokens = torch.empty(num_rows, dtype=torch.int64)
    stored = row_format.empty(num_rows)
    at = id_bytes
    for tensor in (tokens, *stored.tensors.values()):
        end = at + tensor.numel() * tensor.itemsize
        bytes_of(tensor)[:] = memoryview(data)[at:end]
        at = end
    name = data[:id_bytes].decode()
    if raw:
        return Rows(name, tokens, stored.hidden_states, stored.scales)
    return Rows(name, tokens, row_format.restore(stored))


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a tensor in host memory; its own where it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
