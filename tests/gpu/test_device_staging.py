# SPDX-License-Identifier: Apache-2.0
"""State in staging memory of the device: digests as on the host, and the bits of the arena."""

from __future__ import annotations

import pytest
import torch

from vllm._extension import CUDA_LIBRARY
from vllm.distributed.kv_transfer.kv_connector.v1 import seal
from vllm.distributed.kv_transfer.kv_connector.v1.device_seal import DeviceSealer
from vllm.distributed.kv_transfer.kv_connector.v1.p2p import copies as copies_module
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import (
    BlockCopies,
    parts,
    segment_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import Place
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import Staging
from vllm.v1.kv_cache_interface import ArenaPlan, GroupPlan

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels need compute capability 9.0")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"


@pytest.mark.parametrize("size", [241, 256, 1024, 1025, 1088, 2048, 17 * 1024, 100_003, 2**22 + 9])
def test_digests_are_those_of_the_host(size: int) -> None:
    """Of parts that begin anywhere, and of different sizes at once."""
    data = torch.randint(256, (3 * size + 1007,), dtype=torch.uint8)
    spans = [(0, size), (size + 7, size), (2 * size + 16, 1000), (2 * size + 1016, size - 9)]
    spans = spans if size > 250 else spans[:3]
    sealer = DeviceSealer(CUDA, len(data), 241)
    for _ in range(2):  # the memory between is used again
        assert sealer.digests(data.to(CUDA), spans) == seal.digests(data, spans)
    assert sealer.digests(data.to(CUDA), []) == []


def test_digests_of_parts_that_are_brought_meanwhile() -> None:
    """Copies run on another stream, part by part; the memory for sums is used again for each."""
    sizes = [2**22, 2**22 - 1000, 70_000, 300]
    source = torch.randint(256, (sum(sizes),), dtype=torch.uint8, pin_memory=True)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    half = sizes[2] // 2
    parts = [[(start, size)] for start, size in zip(starts, sizes, strict=True)]
    parts[2] = [(starts[2], half), (starts[2] + half, half)]
    target = torch.zeros(sum(sizes), dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    sealer, stream, brought = DeviceSealer(CUDA, 2**22, 300, 5), torch.cuda.Stream(), []

    def bring(part: int) -> torch.cuda.Event:
        brought.append(part)
        span = slice(starts[part], starts[part] + sizes[part])
        with torch.cuda.stream(stream):
            target[span].copy_(source[span], non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    spans = [span for part in parts for span in part]
    assert sealer.digests_in_parts(target, parts, bring) == seal.digests(source, spans)
    assert brought == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="6 spans are more than were planned for"):
        sealer.digests(target, [(0, 300)] * 6)


def test_a_part_that_does_not_come_leaves_the_sealer_as_it_was() -> None:
    data = torch.randint(256, (5000,), dtype=torch.uint8)
    target, sealer = data.to(CUDA), DeviceSealer(CUDA, 5000, 300)
    torch.cuda.synchronize()

    def bring(part: int) -> None:
        if part == 1:
            raise RuntimeError("it does not come")

    spans = [[(0, 2000)], [(2000, 3000)]]
    with pytest.raises(RuntimeError, match="does not come"):
        sealer.digests_in_parts(target, spans, bring)
    assert sealer.digests(target, [(7, 4000)]) == seal.digests(data, [(7, 4000)])


def test_a_changed_bit_changes_the_digest() -> None:
    data = torch.randint(256, (5000,), dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    sealer = DeviceSealer(CUDA, 5000, 5000)
    before = sealer.digests(data, [(0, 5000)])
    for at in (0, 1023, 1024, 4095, 4096, 4999):
        data[at] ^= 4
        torch.cuda.synchronize()
        assert sealer.digests(data, [(0, 5000)]) != before
        data[at] ^= 4
    torch.cuda.synchronize()
    assert sealer.digests(data, [(0, 5000)]) == before


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 1001)], "not all in data of 1000"),
        ([(-1, 300)], "not all in data of 1000"),
        ([(0, 240)], "of more than 240 bytes"),
        ([(0, 300)] * 4, "more than were planned for"),
    ],
)
def test_spans_are_checked(spans: list[tuple[int, int]], message: str) -> None:
    data = torch.zeros(1000, dtype=torch.uint8, device=CUDA)
    with pytest.raises(ValueError, match=message):
        DeviceSealer(CUDA, 1000, 300).digests(data, spans)
    with pytest.raises(ValueError, match="set staging_device to 'cpu'"):
        DeviceSealer(CUDA, 1000, 240)


@pytest.mark.parametrize("bounce_bytes", [copies_module._BOUNCE_BYTES, 2 * 1280, 1])
def test_blocks_pass_through_the_device_as_through_the_host(
    monkeypatch: pytest.MonkeyPatch, bounce_bytes: int
) -> None:
    """Out of one arena and into another: segments, digests and blocks are equal bit by bit,
    however few blocks at a time pass through the device on their way to the host."""
    monkeypatch.setattr(copies_module, "_BOUNCE_BYTES", bounce_bytes)
    groups = (GroupPlan(1, 5000, {}), GroupPlan(4, 1280, {}))  # the first with padding
    plan = ArenaPlan(5120, 40, groups)
    there = torch.randint(256, (40 * 5120,), dtype=torch.uint8, device=CUDA)
    places = [[Place(0, 3), Place(1, 4), Place(2, 9)], [Place(0, 44), Place(1, 45), Place(2, 60)]]
    size = segment_bytes(plan, places)
    spans = [(at, length) for _, _, at, length in parts(plan, places)]
    seen = []
    for device in (CUDA, torch.device("cpu")):
        staging = Staging(2**16, device.type == "cpu", device, smallest=1280)
        sealer = staging.make_sealer("test")
        staging.allocate(100, 1.0)
        offset = staging.allocate(size, 1.0)
        segment = staging.buffer[offset : offset + size]
        copies = BlockCopies(there, plan)
        copies.to_staging(places, segment, copies.mark())
        here = torch.zeros_like(there)
        copies = BlockCopies(here, plan)
        copies.to_arena(places, segment, copies.mark())
        for group, own in enumerate(places):
            stride, length = plan.block_stride(group), groups[group].block_bytes
            for place in own:
                block = slice(place.block * stride, place.block * stride + length)
                assert torch.equal(here[block], there[block])
                here[block] = 0
        assert not here.any(), "nothing else was written"
        seen.append((segment.cpu(), sealer.digests(segment, spans)))
        sealer.close()
    (first, sealed), (second, expected) = seen
    assert torch.equal(first, second) and sealed == expected
