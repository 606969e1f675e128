# SPDX-License-Identifier: Apache-2.0
"""Safetensors files read straight to a device: threads fill pinned buffers, copies follow.

A mapped tensor is copied page by page by one thread, through a buffer of the driver's. Here several
threads read large pieces at once, and each piece crosses to the device while the next are read.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.exceptions import VLLMValidationError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NUM_THREADS = 8
_PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: `num_bytes` bytes from byte `offset` of the file on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """What a safetensors file holds, in the order of its bytes.

    Raises ValueError naming the file for a malformed header, a dtype that torch does not have, or
    tensors that do not lie inside the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, size))
    if len(text) < length:
        raise VLLMValidationError(
            f"{path} is truncated or corrupt: {len(text)} of {length} header bytes"
        )
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = [_stored(name, entry, 8 + length) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VLLMValidationError(f"{path} is truncated or corrupt: {error!r}") from error
    for one in found:
        if one.num_bytes < 0 or one.offset < 0 or one.offset + one.num_bytes > size:
            raise VLLMValidationError(
                f"{path} is truncated or corrupt: {one.name} lies outside the file"
            )
    return sorted(found, key=lambda one: one.offset)


def _stored(name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in _DTYPES:
        raise VLLMValidationError(f"{name} has the dtype {kind}, which is not supported")
    dtype = _DTYPES[kind]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise VLLMValidationError(f"{name} of shape {shape} does not take {end - begin} bytes")
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


@dataclass(frozen=True)
class _Piece:
    """`num_bytes` bytes from byte `offset` of an open file on."""

    file: int
    offset: int
    num_bytes: int


class _Buffer:
    """A pinned buffer, free again when the copy out of it is done."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        on_gpu = device.type == "cuda"
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def read(self, piece: _Piece) -> None:
        """Fill the buffer; runs on a reading thread."""
        if self._copied is not None:
            self._copied.synchronize()
        view = self.bytes.numpy().data[: piece.num_bytes]
        done = 0
        while done < piece.num_bytes:
            count = os.preadv(piece.file, [view[done:]], piece.offset + done)
            if count == 0:
                raise VLLMValidationError("a checkpoint file became shorter while it was read")
            done += count

    def copy_to(self, target: Tensor) -> None:
        """Queue the copy of the first bytes to `target [n]` uint8."""
        target.copy_(self.bytes[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def stream_tensors(
    files: Iterable[tuple[Path, Sequence[StoredTensor]]],
    device: torch.device,
    *,
    num_threads: int = _NUM_THREADS,
    piece_bytes: int = _PIECE_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor on device)` in the given order.

    Reads run ahead by `2 * num_threads` pieces, over the ends of tensors and files. Besides the
    tensor that the caller holds, device memory for one more is taken at most.
    """
    with ExitStack() as stack:
        stored: list[tuple[int, StoredTensor]] = []
        for path, tensors in files:
            file = os.open(path, os.O_RDONLY)
            stack.callback(os.close, file)
            stored += [(file, one) for one in tensors]
        threads = stack.enter_context(ThreadPoolExecutor(num_threads, "read-weights"))
        pieces = iter([p for file, one in stored for p in _pieces(file, one, piece_bytes)])
        pending: deque[tuple[_Piece, _Buffer, Future[None]]] = deque()

        def read(piece: _Piece, buffer: _Buffer) -> None:
            pending.append((piece, buffer, threads.submit(buffer.read, piece)))

        stack.callback(lambda: [future.cancel() for _, _, future in pending])
        for piece in islice(pieces, 2 * num_threads):
            read(piece, _Buffer(device, piece_bytes))
        for _, one in stored:
            tensor = torch.empty(one.shape, dtype=one.dtype, device=device)
            target = tensor.view(-1).view(torch.uint8) if one.num_bytes else tensor
            done = 0
            while done < one.num_bytes:
                piece, buffer, future = pending.popleft()
                future.result()
                buffer.copy_to(target[done : done + piece.num_bytes])
                done += piece.num_bytes
                if (following := next(pieces, None)) is not None:
                    read(following, buffer)
            yield one.name, tensor


def _pieces(file: int, one: StoredTensor, piece_bytes: int) -> Iterator[_Piece]:
    for start in range(0, one.num_bytes, piece_bytes):
        yield _Piece(file, one.offset + start, min(piece_bytes, one.num_bytes - start))
