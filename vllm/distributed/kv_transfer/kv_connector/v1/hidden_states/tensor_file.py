# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors into space that may be reserved beforehand.

Format: github.com/huggingface/safetensors, "Format". The library's own writer always makes a new
file, which would give reserved space back in the middle of writing, when the disk may be full.
"""

import json
import os

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.file_lock import FILE_MODE

#: room for the header of a file with a few tensors
HEADER_ALLOWANCE = 4096

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def create(path: str, num_bytes: int) -> None:
    """Make `path` with `num_bytes` allocated on disk.

    FileExistsError if there is one; OSError (ENOSPC, EFBIG, EDQUOT), and no file, without room.
    """
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def write(path: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write contiguous CPU tensors and `metadata` into `path`, in place, and cut the file to its
    exact size."""
    # The widest elements first keep every tensor aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        offset = _write_all(fd, memoryview(len(text).to_bytes(8, "little") + text), 0)
        for _, tensor in ordered:
            offset = _write_all(fd, _bytes_of(tensor), offset)
        os.ftruncate(fd, offset)
    finally:
        os.close(fd)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_all(fd: int, data: memoryview, offset: int) -> int:
    """pwrite may write less than asked (signals, 2 GiB limit). Returns the offset after `data`."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
    return offset
