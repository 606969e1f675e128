# SPDX-License-Identifier: Apache-2.0
"""Whose core is behind a client's sockets: one's own process, or one that another has started."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from vllm.exceptions import ExplainedError
from vllm.utils import startup_phases
from vllm.utils.own_directory import remove_directory
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.client_link import (
    SHUTDOWN_S,
    ClientLink,
    Sink,
    client_addresses,
)
from vllm.v1.engine.core_process import CoreProcess, first_to_report

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PEER_TIMEOUT_MS = 1000


class CoreLink(ClientLink):
    """A core process of one's own and the sockets to it; nothing may be sent before `wait_ready`
    has returned. Its client has the index 0, and tells the core of further ones.

    `directory`: for the sockets of its clients; the link's own, removed when it is closed.
    `reports_start`: whether the core's start is a part of this process's, phase by phase.
    """

    core: CoreProcess

    def __init__(
        self,
        vllm_config: VllmConfig,
        core: CoreProcess,
        directory: str,
        sink: Sink,
        name: str,
        reports_start: bool,
    ) -> None:
        self._vllm_config = vllm_config
        self._reports_start = reports_start
        self._started = False
        self.directory = directory
        rank = vllm_config.parallel_config.data_parallel_rank
        super().__init__(directory, 0, rank, sink, name, core)
        atexit.register(self.close)

    def wait_ready(self) -> None:
        """Block until the core can take requests; fill in what it decided.

        Raises what `CoreProcess.wait_ready` raises; the link is closed then.
        """
        try:
            ready = self.core.wait_ready()
        except BaseException as error:
            # A core that reported an error is ending; a signal would cut its clean-up short.
            ends_itself = isinstance(error, ExplainedError | ValueError | RuntimeError)
            self.close(SHUTDOWN_S if ends_itself else 0.0)
            raise
        if self._reports_start:
            startup_phases.adopt(ready.phases)
        config = self._vllm_config
        config.decisions.adopt(ready.decisions)
        assert config.model_config is not None
        config.cache_config.num_gpu_blocks = ready.num_gpu_blocks
        config.cache_config.capacity_tokens = ready.capacity_tokens
        config.model_config.max_model_len = ready.max_model_len
        config.scheduler_config.max_model_len = ready.max_model_len
        self._started = True
        self._reader.start()

    def attach(self, client_index: int) -> None:
        """The core listens to the client whose sockets are at `client_addresses`; they may come
        later. An index is used once."""
        addresses = client_addresses(self.directory, client_index)
        message = (client_index, addresses.requests, addresses.outputs)
        self._send(EngineCoreRequestType.ATTACH, message)

    def detach(self, client_index: int) -> None:
        """The client is gone: its requests are aborted."""
        self._send(EngineCoreRequestType.DETACH, client_index)

    def _core_ended(self) -> str | None:
        if self._closing or self.core.process.is_alive():
            return None
        self.core.process.join(1.0)
        if self.core.hang is not None:
            return self.core.hang
        return f"its process ended (exit code {self.core.process.exitcode})"

    def begin_close(self) -> None:
        if not self.process.is_own:
            return
        with self._send_lock:
            if self._closing:
                return
            self._closing = True
            if self._started and self.dead is None:
                with contextlib.suppress(zmq.ZMQError):
                    self._requests.setsockopt(zmq.LINGER, 1000)
                    frames = (EngineCoreRequestType.SHUTDOWN.value, b"\xc0")
                    if self._requests.poll(_PEER_TIMEOUT_MS, zmq.POLLOUT):
                        self._requests.send_multipart(frames)

    def _release_files(self) -> None:
        atexit.unregister(self.close)
        super()._release_files()
        remove_directory(self.directory)


def await_ready(links: Sequence[ClientLink]) -> None:
    """Block until all cores of one's own can take requests; raises the error of the first that
    fails, for which others may wait in vain."""
    own = {link.core: link for link in links if isinstance(link, CoreLink)}
    while own:
        own.pop(first_to_report(list(own))).wait_ready()


@dataclass(frozen=True)
class RunningCore:
    """A core that another process has started: its configuration, and where to reach it."""

    vllm_config: VllmConfig
    directory: str


class AttachedLink(ClientLink):
    """The sockets of a further client of a core that runs already; who started the core has told it
    of this client, and calls `lose` when the core has died."""

    def __init__(self, core: RunningCore, client_index: int, sink: Sink) -> None:
        self._lost: str | None = None
        rank = core.vllm_config.parallel_config.data_parallel_rank
        super().__init__(core.directory, client_index, rank, sink)
        self._reader.start()

    def lose(self, cause: str) -> None:
        """The core is gone."""
        with self._send_lock:
            if not self._closed and self._lost is None:
                self._lost = cause
                os.write(self._stop_write, b"x")

    def _core_ended(self) -> str | None:
        return self._lost
