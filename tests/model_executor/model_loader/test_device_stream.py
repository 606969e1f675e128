# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors in pieces: the same tensors as the library reads, and errors that name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm.model_executor.model_loader import device_stream
from vllm.model_executor.model_loader.device_stream import read_header, stream_tensors
from vllm.model_executor.model_loader.weight_utils import (
    device_weights_iterator,
    safetensors_files,
)

CPU = torch.device("cpu")


def made(seed: int) -> dict[str, Tensor]:
    """Tensors of every dtype, some empty, some without dimensions, odd sizes."""
    torch.manual_seed(seed)
    bytes_of = torch.randint(0, 127, (13, 7), dtype=torch.uint8)
    return {
        f"{seed}.matrix": torch.randn(33, 17),
        f"{seed}.half": torch.randn(5, 3, 2).bfloat16(),
        f"{seed}.float8": bytes_of.view(torch.float8_e4m3fn),
        f"{seed}.exponents": bytes_of.clone().view(torch.float8_e8m0fnu),
        f"{seed}.words": bytes_of.to(torch.uint16),
        f"{seed}.ints": torch.arange(10),
        f"{seed}.flag": torch.tensor([True, False]),
        f"{seed}.scalar": torch.tensor(3.5),
        f"{seed}.empty": torch.zeros(0, 4),
    }


def checkpoint(folder: Path) -> dict[str, Tensor]:
    for seed in (1, 2):
        save_file(made(seed), folder / f"{seed}.safetensors")
    return made(1) | made(2)


def same(found: Tensor, expected: Tensor) -> bool:
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and torch.equal(
        found.cpu().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("piece_bytes", [1, 100, 2**20])
def test_tensors_are_those_of_the_files(tmp_path: Path, device: str, piece_bytes: int) -> None:
    expected = checkpoint(tmp_path)
    files = [(path, read_header(path)) for path in sorted(tmp_path.iterdir())]
    found = dict(
        stream_tensors(files, torch.device(device), num_threads=3, piece_bytes=piece_bytes)
    )
    assert found.keys() == expected.keys()
    assert all(found[name].device.type == device for name in found)
    assert [name for name in found if not same(found[name], expected[name])] == []


def test_reads_run_ahead_but_not_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({f"{i:02}": torch.zeros(4) for i in range(40)}, tmp_path / "a.safetensors")
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(
        device_stream.os, "preadv", lambda *args: (read.append(args[2]), preadv(*args))[1]
    )
    files = [(tmp_path / "a.safetensors", read_header(tmp_path / "a.safetensors"))]
    stream = stream_tensors(files, CPU, num_threads=2, piece_bytes=16)
    next(stream)
    stream.close()
    assert 1 <= len(read) <= 5, "four pieces ahead of the first"


def test_only_indexed_tensors_are_read(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    weight_map = {"1.ints": "1.safetensors", "2.half": "2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = dict(device_weights_iterator(safetensors_files(tmp_path), CPU, use_tqdm=False))
    assert found.keys() == weight_map.keys() and same(found["2.half"], made(2)["2.half"])
    index.write_text(json.dumps({"weight_map": weight_map | {"1.absent": "1.safetensors"}}))
    with pytest.raises(ValueError, match=r"1.safetensors lacks 1 indexed tensors: \['1.absent'\]"):
        dict(device_weights_iterator(safetensors_files(tmp_path), CPU, use_tqdm=False))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(made(1), path)
    whole = path.read_bytes()
    for length in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a.safetensors is truncated or corrupt"):
            read_header(path)
    path.write_bytes(whole)
    files = [(path, read_header(path))]
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="became shorter"):
        list(stream_tensors(files, CPU))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "dtype F4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not take 4 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}, "outside the file"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_the_library_reads_the_same_header(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    path = tmp_path / "1.safetensors"
    library = {name: (t.dtype, tuple(t.shape)) for name, t in load_file(path).items()}
    assert {one.name: (one.dtype, one.shape) for one in read_header(path)} == library
