# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of several hosts meet: a store that listens at one address and no other.

torch's own `tcp://` listens at every address of the host, at a port that is free or not.
"""

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import flag_name

#: of the `distributed_init_method` that names a `MeetingPlace`
_SCHEME = "store://"
#: torch's own for process groups on CPUs
_TIMEOUT_S = 1800
_RETRY_S = 0.25


def listen(host: str, port: int, parameter: str = "master_addr") -> socket.socket:
    """A socket that listens at this address of this host alone; `port` 0 takes a free one.

    Raises `VLLMValidationError`, which names the flag `parameter`, where that is not possible.
    """
    flag = flag_name(parameter)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if address[0] in ("0.0.0.0", "::"):
            raise VLLMValidationError(
                f"{flag} {host} is every address of this host; give the one at which the other "
                "hosts reach it",
                parameter,
                host,
            )
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise VLLMValidationError(
            f"the first host cannot listen at {host}:{port}: {error.strerror or error}; {flag} is "
            "an address of that host, and the port must be free",
            parameter,
            host,
        ) from None
    listener.listen()
    return listener


def connect(host: str, port: int, timeout_s: float, whom: str) -> socket.socket:
    """Tries until somebody listens there. `TimeoutError`, which says `whom` and why, if nobody does
    in that time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host, port), timeout_s)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{whom} does not answer in {timeout_s:g} s "
                    f"(--distributed-timeout-seconds): {error.strerror or error}"
                ) from None
            time.sleep(_RETRY_S)


class MeetingPlace:
    """A store at a free port of `host`. Ranks may connect before it serves, and wait."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host, 0)
        self._host, self._port = self._listener.getsockname()[:2]
        self._store: dist.TCPStore | None = None

    @property
    def init_method(self) -> str:
        """For `init_distributed_environment` of every rank."""
        return f"{_SCHEME}{self._host}:{self._port}"

    def serve(self) -> None:
        """Starts a thread, so that processes may better be forked before."""
        self._store = dist.TCPStore(
            self._host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def close(self) -> None:
        """The ranks have met, or will not."""
        self._listener.close()
        self._store = None


def store_of(init_method: str, timeout_s: int | None) -> dist.Store | None:
    """The client's side of a `MeetingPlace`, None for another init method. `timeout_s`: longest
    wait for another rank."""
    if not init_method.startswith(_SCHEME):
        return None
    host, _, port = init_method.removeprefix(_SCHEME).rpartition(":")
    timeout = timedelta(seconds=timeout_s or _TIMEOUT_S)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
