# SPDX-License-Identifier: Apache-2.0
"""Several GPUs in one process: a capture that relies on the current device and stream is empty, and
its replays leave what the capture left; a stream of each device's own gives the step's values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from vllm.compilation.graph_safety.device.run import empty_graphs_raise
from vllm.compilation.piecewise import DeviceGraph, Pieces, capture
from vllm.kernels.attention.triton_decode import arrivals
from vllm.kernels.stream_counters import per_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
DEVICES = [torch.device("cuda", index) for index in range(2)]


class Step:
    """`out = 2 * x` on one device; both are made before, so that nothing allocates."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.ones(4, device=device)
        self.out = torch.zeros(4, device=device)

    def run(self) -> Tensor:
        return torch.mul(self.x, 2, out=self.out)

    def replayed(self, replay: Callable[[], None], stream: torch.cuda.Stream | None) -> list[float]:
        """What a replay gives after the input became 5."""
        self.x.fill_(5)
        torch.cuda.synchronize(self.x.device)
        with torch.cuda.stream(stream):
            replay()
        torch.cuda.synchronize(self.x.device)
        result: list[float] = self.out.tolist()
        return result


@pytest.fixture
def steps() -> list[Step]:
    torch.cuda.set_device(0)
    made = [Step(device) for device in DEVICES]
    for step in made:
        step.run()
        torch.cuda.synchronize(step.x.device)
    return made


def test_the_current_device_gives_stale_replays(steps: list[Step]) -> None:
    """Work for the second GPU goes to its own current stream, which nobody captures."""
    step = steps[1]
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(DEVICES[0])):
            step.run()
    assert any("CUDA Graph is empty" in str(one.message) for one in shown)
    assert step.replayed(graph.replay, None) == [2.0] * 4, "as at the capture"


def test_an_empty_graph_of_another_device_is_an_error(steps: list[Step]) -> None:
    graph = torch.cuda.CUDAGraph()
    with empty_graphs_raise(), pytest.raises(UserWarning, match="empty"):
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(DEVICES[0])):
            steps[1].run()


def _captured(step: Step, stream: torch.cuda.Stream) -> Pieces:
    """As a worker captures: on its device and on a stream of that device."""
    with torch.cuda.stream(stream), empty_graphs_raise():
        new_graph = partial(DeviceGraph, torch.cuda.graph_pool_handle())
        pieces, _ = capture(step.run, new_graph, split=False)
    return pieces


def test_a_stream_of_each_device_gives_the_steps_values(steps: list[Step]) -> None:
    streams = [torch.cuda.Stream(device) for device in DEVICES]
    pieces = [_captured(step, stream) for step, stream in zip(steps, streams, strict=True)]
    # All are captured before any is replayed, and the current device is the first one throughout.
    for step, stream, one in zip(steps, streams, pieces, strict=True):
        assert torch.cuda.current_device() == 0
        assert step.replayed(one.replay, stream) == [10.0] * 4


def test_devices_replay_beside_each_other(steps: list[Step]) -> None:
    streams = [torch.cuda.Stream(device) for device in DEVICES]
    pieces = [_captured(step, stream) for step, stream in zip(steps, streams, strict=True)]
    for value in range(64):
        for step, stream, one in zip(steps, streams, pieces, strict=True):
            with torch.cuda.stream(stream):
                step.x.fill_(value)
                one.replay()
        for step, stream in zip(steps, streams, strict=True):
            stream.synchronize()
            assert step.out.tolist() == [2.0 * value] * 4


def test_counters_that_launches_share_are_of_one_device() -> None:
    first, second = map(arrivals, DEVICES)
    assert (first.device, second.device) == tuple(DEVICES)
    assert arrivals(DEVICES[0]) is first


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_counters_that_launches_share_are_of_one_stream(device: torch.device) -> None:
    """Of two engines on one GPU each has a stream, and their launches may overlap."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    made = []
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            made.append(arrivals(device))
    assert made[0] is made[2] and made[1] is made[3]
    assert made[0].data_ptr() != made[1].data_ptr()
    torch.cuda.synchronize(device)
    assert not any(counter.any() for counter in made)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_counter_made_inside_a_capture_is_zeroed_by_every_replay(device: torch.device) -> None:
    """Also where another device is the current one."""

    @per_stream
    def counter(device: torch.device) -> Tensor:
        return torch.zeros(1, device=device)

    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        with torch.cuda.device(DEVICES[0]):
            captured = counter(device)
        captured.add_(1)
    with torch.cuda.stream(stream):
        before = counter(device)
        assert before is not captured
        for _ in range(3):
            graph.replay()
        assert captured.item() == 1 and before.item() == 0
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        assert counter(device) is before
        before.add_(0)
