# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers: taken, shared, and left behind."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from vllm.entrypoints.listening import bind_another, bound, listen, refuse_other_servers
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError


def at(port: int) -> FrontEndArgs:
    return FrontEndArgs(host="127.0.0.1", port=port)


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


@pytest.mark.parametrize("shared", [False, True])
def test_an_address_that_cannot_be_had_is_named(shared: bool) -> None:
    with bound(at(0), shared) as sock:
        listen(sock, at(0))
        port = port_of(sock)
        with (
            pytest.raises(VLLMValidationError, match=f"127.0.0.1:{port}.*choose another"),
            bound(at(port), shared),
        ):
            pass
    with (
        pytest.raises(VLLMValidationError, match="cannot listen on 192.0.2.1:0: Cannot assign"),
        bound(FrontEndArgs(host="192.0.2.1", port=0), shared),
    ):
        pass


def test_a_port_that_was_taken_while_the_model_was_loaded_is_named() -> None:
    """Two sockets may be bound to one port until one of them listens."""
    with bound(at(0)) as late:
        args = at(port_of(late))
        with bound(args) as early:
            listen(early, args)
            with pytest.raises(VLLMValidationError, match="Address already in use; choose another"):
                listen(late, args)


def test_a_port_is_shared_within_one_server_only() -> None:
    with bound(at(0), shared=True) as first:
        args = at(port_of(first))
        refuse_other_servers(args)
        with bind_another(args) as second:
            for sock in (first, second):
                listen(sock, args)
            with pytest.raises(VLLMValidationError, match="Address already in use"):
                refuse_other_servers(args)


def test_the_file_of_a_unix_socket_goes_with_its_server_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    args = FrontEndArgs(uds=str(path))
    with bound(args):
        with pytest.raises(VLLMValidationError, match="Address already in use; remove the file"):
            with bound(args):
                pass
        assert path.exists()
    assert not path.exists()
    with bound(args):
        path.unlink()


def test_a_new_server_keeps_its_unix_socket_when_the_old_one_ends(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    args = FrontEndArgs(uds=str(path))
    with contextlib.ExitStack() as new:
        with bound(args):
            path.unlink()
            new.enter_context(bound(args))
        assert path.exists()
    assert not path.exists()


def test_a_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / ("long" * 40))
    with pytest.raises(VLLMValidationError, match="cannot listen on .*: AF_UNIX path too long"):
        with bound(FrontEndArgs(uds=path)):
            pass
