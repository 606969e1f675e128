# SPDX-License-Identifier: Apache-2.0
"""What launches share is one stream's; on GPUs: tests/gpu/test_graph_devices.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vllm
from vllm.kernels import stream_counters
from vllm.kernels.stream_counters import per_stream

CPU = torch.device("cpu")
ROOT = Path(vllm.__file__).parent
#: where launches and what they share are made
KERNELS = ("kernels", "model_executor/layers")
_CACHES = {"cache", "lru_cache", "cached_property"}


class Streams:
    """A device's streams and captures, played."""

    current, capturing = 1, False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    played = Streams()
    monkeypatch.setattr(stream_counters, "stream_of", lambda device: played.current)
    monkeypatch.setattr(stream_counters, "is_capturing", lambda device: played.capturing)
    return played


@per_stream
def zeros(device: torch.device, count: int) -> Tensor:
    """Of a kernel."""
    return torch.zeros(count, device=device)


def test_each_stream_has_its_own(streams: Streams) -> None:
    first = zeros(CPU, 3)
    assert zeros(CPU, 3) is first and zeros(CPU, 4) is not first
    streams.current = 2
    second = zeros(CPU, 3)
    assert second is not first and zeros(CPU, 3) is second
    streams.current = 1
    assert zeros(CPU, 3) is first
    assert len(zeros(torch.device("meta"), 3)) == 3


def test_what_a_capture_makes_is_for_one_launch(streams: Streams) -> None:
    streams.current, streams.capturing = 3, True
    captured = zeros(CPU, 5)
    assert zeros(CPU, 5) is not captured
    streams.capturing = False
    made = zeros(CPU, 5)
    assert made is not captured
    streams.capturing = True
    assert zeros(CPU, 5) is made


def test_a_device_without_streams_has_one() -> None:
    assert stream_counters.stream_of(CPU) == 0 and not stream_counters.is_capturing(CPU)
    assert zeros(CPU, 7) is zeros(CPU, 7) and zeros.__doc__ == "Of a kernel."


def _cached_tensors(source: str) -> Iterator[str]:
    """Functions that keep a tensor for their arguments alone."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
        cached = any(name.rpartition(".")[2] in _CACHES for name in decorators)
        result = "" if node.returns is None else ast.unparse(node.returns)
        if cached and "Tensor" in result.replace("TensorDescriptor", ""):
            yield node.name


def test_no_tensor_of_kernels_is_kept_by_device_alone() -> None:
    found = [
        (path.relative_to(ROOT).as_posix(), name)
        for folder in KERNELS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in _cached_tensors(path.read_text())
    ]
    assert found == [], "launches of two streams would share it: `stream_counters.per_stream`"


def test_a_tensor_that_is_kept_by_device_is_seen() -> None:
    source = "@functools.cache\ndef arrivals(device: torch.device) -> Tensor:\n    return x\n"
    assert list(_cached_tensors(source)) == ["arrivals"]
    assert list(_cached_tensors(source.replace("functools.cache", "per_stream"))) == []
