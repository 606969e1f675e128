# SPDX-License-Identifier: Apache-2.0
"""Every receiver gets every message, whole and in order, whatever their sizes."""

from __future__ import annotations

import multiprocessing
import random
import threading

import pytest

from vllm.v1.executor import broadcast
from vllm.v1.executor.broadcast import Receiver, Sender


def nothing() -> None:
    return None


def receive_all(receiver: Receiver, into: list[bytes]) -> None:
    while True:
        try:
            into.append(receiver.receive())
        except EOFError:
            receiver.close()
            return


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_messages_arrive_in_order(num_receivers: int) -> None:
    """Of one byte, of exactly one slot, and of more than the ring holds."""
    rng = random.Random(0)
    slot, ring = broadcast._SLOT_BYTES, broadcast._SLOT_BYTES * broadcast._NUM_SLOTS
    sizes = [1, slot - 1, slot, slot + 1, 2 * slot, ring, ring + 1, 3 * ring + 5]
    messages = [rng.randbytes(size) for size in [*sizes, *(rng.randint(1, 3 * slot),) * 50]]
    sender = Sender(multiprocessing.get_context("spawn"), num_receivers)
    got: list[list[bytes]] = [[] for _ in range(num_receivers)]
    threads = [
        threading.Thread(target=receive_all, args=pair)
        for pair in zip(sender.receivers, got, strict=True)
    ]
    for thread in threads:
        thread.start()
    for message in messages:
        sender.send(message, nothing)
    sender.close()
    for thread in threads:
        thread.join(60)
    assert all(received == messages for received in got)


def test_a_full_ring_asks_whether_waiting_is_of_use() -> None:
    sender = Sender(multiprocessing.get_context("spawn"), 2)

    def give_up() -> None:
        raise InterruptedError("enough")

    for _ in range(broadcast._NUM_SLOTS):
        sender.send(b"x", give_up)
    sender.receivers[0].receive()
    with pytest.raises(InterruptedError):
        sender.send(b"y", give_up)
    sender.receivers[1].receive()
    sender.send(b"y", give_up)


def test_a_receiver_that_is_gone_keeps_nobody_from_receiving() -> None:
    sender = Sender(multiprocessing.get_context("spawn"), 2)
    sender.receivers[0].close()
    sender.send(b"x", nothing)
    assert sender.receivers[1].receive() == b"x"
