# SPDX-License-Identifier: Apache-2.0
"""Events and their times out of the bytes of a reply."""

from __future__ import annotations

import random

import pytest

from vllm.benchmarks.connection import Reply


def received(*reads: tuple[float, bytes]) -> Reply:
    reply = Reply()
    for now, data in reads:
        reply.body += data
        reply.note_read(now)
    return reply


def test_every_event_of_a_read_has_its_time() -> None:
    reply = received((1.0, b"data: a\n\ndata: b\n\n"), (2.0, b"data: c\n\n"))
    assert list(reply.events()) == [(1.0, b"a"), (1.0, b"b"), (2.0, b"c")]


def test_an_event_has_come_with_the_end_of_its_line() -> None:
    reads = [(1.0, b"data: a"), (2.0, b"bc"), (3.0, b"\n"), (4.0, b"\ndata: d\n"), (5.0, b"\n")]
    assert list(received(*reads).events()) == [(3.0, b"abc"), (4.0, b"d")]


def test_a_read_without_body_is_no_time_of_an_event() -> None:
    reply = received((1.0, b""), (2.0, b"data: a\n\n"), (3.0, b""), (4.0, b"data: b\n\n"))
    assert list(reply.events()) == [(2.0, b"a"), (4.0, b"b")] and reply.times == [2.0, 4.0]


def test_what_is_no_event() -> None:
    body = b": still here\r\n\r\nevent: x\ndata:{}\r\n\r\ndata: [DONE]\n\ndata: cut"
    assert list(received((1.0, body)).events()) == [(1.0, b"{}")]


@pytest.mark.parametrize("seed", range(20))
def test_wherever_reads_are_cut(seed: int) -> None:
    """Against the definition: the first read after which the line is complete."""
    rng = random.Random(seed)
    lines = [f"data: {i}{'x' * rng.randrange(9)}".encode() for i in range(12)]
    body = b"".join(line + b"\n\n" for line in lines)
    cuts = sorted({rng.randrange(1, len(body)) for _ in range(rng.randrange(1, 20))}) + [len(body)]
    reads = [(float(n), body[a:b]) for n, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False))]
    ends = [body.index(line + b"\n") + len(line) + 1 for line in lines]
    expected = [
        (float(next(n for n, cut in enumerate(cuts) if cut >= end)), line[6:])
        for end, line in zip(ends, lines, strict=True)
    ]
    assert list(received(*reads).events()) == expected
