# SPDX-License-Identifier: Apache-2.0
"""The address of a server: taken before the engine starts, listened at when it has started."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError

#: connections that wait to be accepted
BACKLOG = 2048
#: of `--uds`, made by this process: what they were then
_OWN_FILES: list[tuple[str, os.stat_result]] = []


@contextlib.contextmanager
def bound(args: FrontEndArgs, shared: bool = False) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet, so readiness probes fail until the model is loaded.
    It is closed at the end, and the file of `--uds` removed.

    `shared`: more sockets of this server may listen at the same port (`bind_another`), and
    connections are spread over all. Raises `VLLMValidationError` when the address cannot be had.
    """
    if args.uds:
        with _bound_unix(args.uds) as sock:
            yield sock
        return
    if shared:
        refuse_other_servers(args)
    with _bind(args, shared) as sock:
        yield sock


def bind_another(args: FrontEndArgs) -> socket.socket:
    """One more socket at a port that is shared, bound alike."""
    return _bind(args, shared=True)


def refuse_other_servers(args: FrontEndArgs) -> None:
    """`VLLMValidationError` where another server listens at the TCP port, before sockets of this
    one do: the system would spread connections over both if both share their port."""
    if not args.uds:
        _bind(args, shared=False).close()


def listen(sock: socket.socket, args: FrontEndArgs) -> None:
    """Accept connections from now on.

    Raises `VLLMValidationError` when another server listens since `sock` was bound: two may bind
    one port while neither listens.
    """
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _port_error(args, error) from None


def _bind(args: FrontEndArgs, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if args.host and ":" in args.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((args.host or "", args.port))
    except OSError as error:
        sock.close()
        raise _port_error(args, error) from None
    return sock


def _port_error(args: FrontEndArgs, error: OSError) -> VLLMValidationError:
    return VLLMValidationError(
        f"cannot listen on {args.host or '0.0.0.0'}:{args.port}: {_reason(error)}; "
        "choose another --host or --port",
        "port",
        args.port,
    )


@contextlib.contextmanager
def _bound_unix(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(path)
        except OSError as error:
            raise VLLMValidationError(
                f"cannot listen on {path}: {_reason(error)}; remove the file or choose another "
                "--uds",
                "uds",
                path,
            ) from None
        own = (path, os.stat(path))
        _OWN_FILES.append(own)
        try:
            yield sock
        finally:
            _OWN_FILES.remove(own)
            _remove(*own)


def remove_own_files() -> None:
    """Of `--uds`, where the process ends without unwinding."""
    for path, made in _OWN_FILES:
        _remove(path, made)


def _remove(path: str, made: os.stat_result) -> None:
    """Unless it is another server's by now: somebody removed ours and started one."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), made):
            os.unlink(path)


def _reason(error: OSError) -> str:
    """What the system says; Python's own errors have a text alone."""
    return error.strerror or str(error)
