# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of several hosts meet: a store that listens at one address and no other.

torch's own `tcp://` listens at every address of the host, at a port that is free or not.
"""

import errno
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from vllm.exceptions import StartTimeoutError, VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.options import flag_name

logger = init_logger(__name__)

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
    except (socket.gaierror, UnicodeError) as error:
        raise VLLMValidationError(
            f"{flag} {_unknown(host, error)}; give an address of the first host, which is this one",
            parameter,
            host,
        ) from None
    if address[0] in ("0.0.0.0", "::"):
        raise VLLMValidationError(
            f"{flag} {host} is every address of this host; give the one at which the other hosts "
            "reach it",
            parameter,
            host,
        )
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise VLLMValidationError(_why_not(error, flag, host, port), parameter, host) from None
    return listener


def _why_not(error: OSError, flag: str, host: str, port: int) -> str:
    """What keeps the first host from listening there, and what to do."""
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{flag} {host} is no address of this host ({_reason(error)}), which is the first one "
            "and listens there; give one of its own, or its --node-rank if another host is the "
            "first"
        )
    taken = error.errno == errno.EADDRINUSE
    instead = "; give another --master-port, on all hosts" if taken else ""
    return f"the first host cannot listen at {host}:{port}: {_reason(error)}{instead}"


def _unknown(host: str, error: OSError | UnicodeError) -> str:
    return f"{host} is no address, and no name that this host knows one of ({_reason(error)})"


def _reason(error: OSError | UnicodeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def connect(host: str, port: int, timeout_s: float, whom: str) -> socket.socket:
    """Tries until somebody listens there. `StartTimeoutError`, which says `whom` and why, if nobody
    does in that time. What else than a refusal is in the way is logged at once: a name may be known
    later, but a wrong one should not be found out at the end of the time."""
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        try:
            return socket.create_connection((host, port), timeout_s)
        except (OSError, UnicodeError) as error:
            is_unknown = isinstance(error, socket.gaierror | UnicodeError)
            why = _unknown(host, error) if is_unknown else _reason(error)
            if time.monotonic() > deadline:
                raise StartTimeoutError(
                    f"{whom} does not answer in {timeout_s:g} s "
                    f"(--distributed-timeout-seconds): {why}"
                ) from None
            if why != said and not isinstance(error, ConnectionRefusedError):
                logger.warning("%s cannot be reached so far: %s", whom, why)
                said = why
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
