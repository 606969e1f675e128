# SPDX-License-Identifier: Apache-2.0
"""Where ranks of several hosts meet."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from vllm.distributed.rendezvous import MeetingPlace, listen, store_of
from vllm.exceptions import VLLMValidationError


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
    with pytest.raises(VLLMValidationError, match=f"cannot listen at {host}:{port}: Address al"):
        listen(host, port)
    listener.close()
    listen(host, port).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_none(host: str) -> None:
    with pytest.raises(VLLMValidationError, match="is every address of this host") as caught:
        listen(host, 0)
    assert caught.value.parameter == "master_addr"


def test_a_name_that_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(VLLMValidationError, match="Name or service not known; --master-addr is"):
        listen("nobody.invalid", 0)
