# SPDX-License-Identifier: Apache-2.0
"""Messages between hosts: whole, in order, and an end that is noticed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.v1.executor.fake_worker import wait_until
from vllm.distributed.rendezvous import listen
from vllm.v1.executor.message_socket import SILENCE_S, MessageSocket

Pair = tuple[MessageSocket, MessageSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = listen("127.0.0.1", 0)
    one = MessageSocket(socket.create_connection(listener.getsockname()))
    two = MessageSocket(listener.accept()[0], "the peer")
    listener.close()
    yield one, two
    one.close()
    two.close()


def taken(end: MessageSocket, count: int) -> list[bytes]:
    found: list[bytes] = []
    wait_until(lambda: len(found.extend(end.take()) or found) >= count)  # type: ignore[func-returns-value]
    return found


def never() -> None:
    """Waiting is all right."""


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    """Those larger than the kernel's buffers too, which the receiver must empty meanwhile."""
    one, two = pair
    sent = [b"", b"x", os.urandom(9 * 2**20), b"last"]
    sender = threading.Thread(target=lambda: [one.send(message, never) for message in sent])
    sender.start()
    assert taken(two, len(sent)) == sent
    sender.join()
    assert two.take() == []


def test_one_message_is_received_and_others_stay(pair: Pair) -> None:
    one, two = pair
    for message in (b"first", b"second", b"third"):
        one.send(message, never)
    assert two.receive(60) == b"first"
    assert taken(two, 2) == [b"second", b"third"]
    with pytest.raises(TimeoutError, match="no message in 0.01 s"):
        two.receive(0.01)


def test_the_end_comes_after_all_messages(pair: Pair) -> None:
    one, two = pair
    one.send(b"last words", never)
    assert not two.is_closed() and not two.wait_until_closed(0)
    one.close()
    assert two.wait_until_closed(60) and two.is_closed()
    assert taken(two, 1) == [b"last words"]
    with pytest.raises(EOFError, match="connection closed"):
        two.take()
    with pytest.raises(EOFError, match="connection closed"):
        two.receive(60)


def test_who_sends_to_one_that_does_not_read_may_give_up(pair: Pair) -> None:
    def give_up() -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        pair[0].send(bytes(64 * 2**20), give_up)


def test_who_sends_to_one_that_is_gone_is_told(pair: Pair) -> None:
    one, two = pair

    def leave() -> None:
        two.close()

    with pytest.raises(OSError):
        one.send(bytes(64 * 2**20), leave)


def test_a_silent_host_is_a_lost_connection(pair: Pair) -> None:
    """The kernel's clock is not waited for: it is asked."""
    for end in pair:
        with socket.socket(fileno=os.dup(end.fileno())) as copy:
            options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
            idle, interval, count = (copy.getsockopt(socket.IPPROTO_TCP, one) for one in options)
            assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            unanswered = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert idle + interval * count == SILENCE_S < 30
        assert unanswered == SILENCE_S * 1000
