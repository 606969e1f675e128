# SPDX-License-Identifier: Apache-2.0
"""Where ranks of several hosts meet."""

from __future__ import annotations

import re
import socket
import threading

import pytest
import torch.distributed as dist

from tests.ports import free_port
from vllm.distributed.rendezvous import MeetingPlace, connect, listen, store_of
from vllm.exceptions import StartTimeoutError, VLLMValidationError


def test_ranks_may_come_before_the_store_serves() -> None:
    place = MeetingPlace("127.0.0.1")
    found: list[dist.Store | None] = []
    early = threading.Thread(target=lambda: found.append(store_of(place.init_method, 60)))
    early.start()
    place.serve()
    late = store_of(place.init_method, None)
    early.join(60)
    (first,) = found
    assert first is not None and late is not None
    first.set("rank", "0")
    assert late.get("rank") == b"0"
    place.close()


def test_other_methods_are_torchs_own() -> None:
    assert store_of("file:///tmp/store", None) is None
    assert store_of("tcp://127.0.0.1:1", None) is None


def test_it_listens_at_one_address() -> None:
    listener = listen("localhost", 0)
    host, port = listener.getsockname()[:2]
    assert host in ("127.0.0.1", "::1")
    words = f"cannot listen at {host}:{port}: Address already in use; give another --master-port"
    with pytest.raises(VLLMValidationError, match=words):
        listen(host, port)
    listener.close()
    listen(host, port).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_none(host: str) -> None:
    with pytest.raises(VLLMValidationError, match="is every address of this host") as caught:
        listen(host, 0)
    assert caught.value.parameter == "master_addr"


def test_an_address_of_another_host() -> None:
    """What a program that only looks for a free port asks for says nothing of ports."""
    with pytest.raises(VLLMValidationError, match="^--master-addr 192.0.2.1 is no address of this"):
        listen("192.0.2.1", 0)


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)


NOBODYS = r"nobody.invalid is no address, and no name .* \(Name or service not known\)"


@pytest.mark.usefixtures("no_names")
def test_a_name_that_is_nobodys_is_not_listened_at() -> None:
    with pytest.raises(VLLMValidationError, match=f"^--master-addr {NOBODYS}; give an address"):
        listen("nobody.invalid", 0)


@pytest.mark.usefixtures("no_names")
def test_a_name_that_is_nobodys_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """It may be known later: a host's name often is when the host has started."""
    with pytest.raises(StartTimeoutError, match=f"node 0 does not answer in 0.3 s .*: {NOBODYS}"):
        connect("nobody.invalid", 1, 0.3, "node 0")
    [told] = caplog.messages
    assert re.search(f"node 0 cannot be reached so far: {NOBODYS}", told)


def test_a_host_that_does_not_listen_yet_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StartTimeoutError, match="node 0 does not answer .*: Connection refused"):
        connect("127.0.0.1", free_port(), 0.3, "node 0")
    assert not caplog.messages
