# SPDX-License-Identifier: Apache-2.0
"""How rows of hidden states are stored, and reading stored files back.

`auto` stores them as the model computes them. `fp8_e4m3` stores an element `x` as
`float8_e4m3fn(x / s)` with one fp32 scale per row and column, `s = max|x| / 448`: 448 is the
largest finite float8_e4m3fn. It has 3 bits of mantissa and a smallest normal of 2^-6 (Micikevicius
et al. 2022, arXiv:2209.05433), so a restored element is off by `max(|x| / 16, s / 1024)` at most,
and by `max|x| / 28` at most, but for fp32 arithmetic (`4e-6` of that), before it is rounded to the
model's dtype.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from vllm.exceptions import VLLMValidationError

StorageDtype = Literal["auto", "fp8_e4m3"]
STORAGE_DTYPES: tuple[StorageDtype, ...] = ("auto", "fp8_e4m3")

#: key of `kv_connector_extra_config`
STORAGE_DTYPE_KEY = "storage_dtype"
#: key of a file's metadata: ids of the columns, JSON
LAYER_IDS_KEY = "layer_ids"
#: names of the tensors of a file
ROWS, SCALES = "hidden_states", "hidden_states_scales"

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
#: smallest scale: rows of zeros, and of less than 448 times this, are divided by it
_MIN_SCALE = torch.finfo(torch.float32).tiny


def storage_dtype_of(extra_config: Mapping[str, Any]) -> StorageDtype:
    """What a connector's settings ask for. Raises `VLLMValidationError` for anything unknown."""
    value = extra_config.get(STORAGE_DTYPE_KEY, "auto")
    if value not in STORAGE_DTYPES:
        raise VLLMValidationError(
            f"{STORAGE_DTYPE_KEY} {value!r}: choose one of {', '.join(STORAGE_DTYPES)}",
            parameter=STORAGE_DTYPE_KEY,
            value=value,
        )
    return value


@dataclass(frozen=True)
class RowFormat:
    """How one layer's rows `[columns, hidden]` of `dtype` are stored."""

    columns: int
    hidden: int
    dtype: torch.dtype
    storage: StorageDtype = "auto"

    @property
    def row_bytes(self) -> int:
        """Of one stored row, scales included."""
        if self.storage == "auto":
            return self.columns * self.hidden * self.dtype.itemsize
        return self.columns * (self.hidden * _FP8.itemsize + torch.float32.itemsize)

    @property
    def metadata(self) -> dict[str, str]:
        """What a file says of its tensors; nothing where their own dtypes say all."""
        if self.storage == "auto":
            return {}
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            STORAGE_DTYPE_KEY: self.storage,
            "scales": f"{SCALES} float32 [n, columns, 1]; a value is {ROWS} * {SCALES}",
        }

    def empty(self, num_rows: int, pin_memory: bool = False) -> StoredRows:
        """Host memory for `num_rows` stored rows."""
        shape = (num_rows, self.columns, self.hidden)
        if self.storage == "auto":
            return StoredRows(torch.empty(shape, dtype=self.dtype, pin_memory=pin_memory))
        return StoredRows(
            torch.empty(shape, dtype=_FP8, pin_memory=pin_memory),
            torch.empty((*shape[:2], 1), dtype=torch.float32, pin_memory=pin_memory),
        )

    def store(self, rows: Tensor) -> StoredRows:
        """`rows [n, columns, hidden]` as they are stored, on their device; never waits for it."""
        return StoredRows(rows) if self.storage == "auto" else quantize(rows)

    def restore(self, stored: StoredRows) -> Tensor:
        """`[n, columns, hidden]` of the model's dtype."""
        return stored.hidden_states if stored.scales is None else dequantize(stored, self.dtype)

    def problem(self, stored: StoredRows, num_rows: int) -> str | None:
        """Why these are not `num_rows` rows of this format; None if they are."""
        expected = {ROWS: (num_rows, self.columns, self.hidden)}
        dtype = self.dtype
        if self.storage != "auto":
            expected[SCALES] = (num_rows, self.columns, 1)
            dtype = _FP8
        found = {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()}
        if found != expected:
            return f"{found} for {num_rows} tokens instead of {expected}"
        if stored.hidden_states.dtype != dtype:
            return f"{stored.hidden_states.dtype} rows instead of {dtype}"
        return None


@dataclass(frozen=True)
class StoredRows:
    """`hidden_states [n, columns, hidden]`, and their fp32 `scales [n, columns, 1]` if they are
    float8_e4m3fn."""

    hidden_states: Tensor
    scales: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in a file."""
        rows = {ROWS: self.hidden_states}
        return rows if self.scales is None else {**rows, SCALES: self.scales}


def quantize(rows: Tensor) -> StoredRows:
    """`rows [n, columns, hidden]` of any float dtype in eight bits. What is not finite makes its
    row and column NaN."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    # Divided by a number, a GPU would multiply by its reciprocal.
    scales = (largest / torch.full_like(largest, _FP8_MAX)).clamp(min=_MIN_SCALE)
    return StoredRows((rows / scales).to(_FP8), scales)


def dequantize(stored: StoredRows, dtype: torch.dtype) -> Tensor:
    """The values of rows in eight bits, `[n, columns, hidden]`, rounded to `dtype`."""
    assert stored.scales is not None
    return (stored.hidden_states.float() * stored.scales).to(dtype)


def file_metadata(row_format: RowFormat, layer_ids: Sequence[int]) -> dict[str, str]:
    """Of a file whose columns are the streams after `layer_ids` layers."""
    return {LAYER_IDS_KEY: json.dumps([*layer_ids]), **row_format.metadata}


def stored_layer_ids(path: str | os.PathLike[str]) -> list[int] | None:
    """After how many layers the columns of a complete file are; None if it does not say. Raises as
    `read_hidden_states`."""
    with safe_open(os.fspath(path), framework="pt") as file:
        said = (file.metadata() or {}).get(LAYER_IDS_KEY)
    return None if said is None else json.loads(said)


def read_hidden_states(path: str | os.PathLike[str], raw: bool = False) -> dict[str, Tensor]:
    """The tensors of a complete file: `hidden_states [n, columns, hidden]` and `token_ids [n]`.

    Rows in eight bits come back in the model's dtype; with `raw` as they are stored, beside
    `hidden_states_scales [n, columns, 1]`. FileNotFoundError without the file, SafetensorError if
    it is damaged, ValueError for a storage format that is not known here.
    """
    with safe_open(os.fspath(path), framework="pt") as file:
        metadata = file.metadata() or {}
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    storage = metadata.get(STORAGE_DTYPE_KEY, "auto")
    if raw or storage == "auto":
        return tensors
    if storage not in STORAGE_DTYPES:
        raise ValueError(f"{path}: {STORAGE_DTYPE_KEY} {storage!r} is not known to this version")
    stored = StoredRows(tensors.pop(ROWS), tensors.pop(SCALES))
    dtype: torch.dtype = vars(torch)[metadata["dtype"]]
    return {ROWS: dequantize(stored, dtype), **tensors}
