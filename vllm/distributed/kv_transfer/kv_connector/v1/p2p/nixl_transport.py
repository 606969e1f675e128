# SPDX-License-Identifier: Apache-2.0
"""Bytes through NIXL: NVLink, RDMA, shared memory or TCP, whatever its back end finds.

The library has no time limits, and its agent is not thread-safe: calls are short, made under a
lock, and a transfer is polled until the deadline. A dead peer is an exception or a state `ERR`.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import (
    CannotRegister,
    Range,
    StillWriting,
    Transport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Address, Deadline, PeerLost
from vllm.logger import init_logger

logger = init_logger(__name__)

#: between two looks at a transfer
_POLL_S = 0.0002


class NixlTransport(Transport):
    """`name`: unique among the agents that meet. ImportError, saying what to install, without the
    library."""

    def __init__(self, name: str, backends: Sequence[str] = ("UCX",)) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ImportError(
                f"the nixl library is needed ({error}): pip install 'vllm[nixl]', or use what "
                "needs none: P2pConnector for NixlConnector, StreamHiddenStatesConnector for "
                "NixlHiddenStatesConnector"
            ) from error
        # The progress thread serves peers that read over TCP while nothing is called here.
        config = nixl_agent_config(backends=list(backends), enable_prog_thread=True)
        self._agent: Any = nixl_agent(name, config)
        self._name = name
        self._lock = threading.Lock()
        self._regions: list[Any] = []
        self._device: torch.device | None = None
        self._readable = self._target = 0
        #: agent name -> where its readable memory begins, and on which of its devices
        self._peers: dict[str, tuple[int, int]] = {}

    def register(self, readable: Tensor | None, target: Tensor | None) -> None:
        for buffer in (readable, target):
            if buffer is None:
                continue
            if buffer.is_cuda:
                self._device = buffer.device
            region = [(buffer.data_ptr(), buffer.nbytes, self._device_id, "")]
            try:
                self._regions.append(self._agent.register_memory(region, self._kind))
            except Exception as error:  # the library's exceptions have no public base
                self._device = None
                self._deregister()
                raise CannotRegister(
                    f"NIXL cannot use memory of {buffer.device}: {error!r}"
                ) from error
        self._readable = 0 if readable is None else readable.data_ptr()
        self._target = 0 if target is None else target.data_ptr()

    @property
    def _kind(self) -> str:
        """NIXL's name of the registered memory's kind."""
        return "DRAM" if self._device is None else "VRAM"

    @property
    def _device_id(self) -> int:
        return 0 if self._device is None else self._device.index or 0

    def describe(self) -> bytes:
        with self._lock:
            metadata: bytes = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode([self._name, metadata, self._readable, self._device_id])

    def connect(self, address: Address, description: bytes) -> str:
        name, metadata, start, device_id = msgspec.msgpack.decode(description)
        if self._device is not None:
            # UCX asks this thread's context how it can reach the memory that it hears of here.
            _make_current(self._device)
        with self._lock:
            if name != self._name:  # an engine may be its own peer
                self._agent.add_remote_agent(metadata)
            self._peers[name] = start, device_id
        return str(name)

    def read(self, peer: str, ranges: Sequence[Range], deadline: Deadline) -> None:
        base, remote_id = self._peers[peer]
        local = [(self._target + part.local, part.size, self._device_id) for part in ranges]
        remote = [(base + part.remote, part.size, remote_id) for part in ranges]
        if self._device is not None:
            _make_current(self._device)
        with self._lock:
            try:
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(local, self._kind),
                    self._agent.get_xfer_descs(remote, self._kind),
                    peer,
                )
            except Exception as error:  # the library's exceptions have no public base
                raise PeerLost(f"{peer}: {error!r}") from error
        try:
            self._follow(peer, handle, deadline)
        finally:
            self._release(peer, handle)

    def _follow(self, peer: str, handle: Any, deadline: Deadline) -> None:
        for attempt in itertools.count():
            deadline.left(peer)
            with self._lock:
                try:
                    begins = attempt == 0
                    call = self._agent.transfer if begins else self._agent.check_xfer_state
                    state = call(handle)
                except Exception as error:
                    raise PeerLost(f"{peer}: {error!r}") from error
            if state == "DONE":
                return
            if state == "ERR":
                raise PeerLost(f"{peer}: the transfer failed")
            time.sleep(_POLL_S)

    def _release(self, peer: str, handle: Any) -> None:
        """An error alone does not say that the device has stopped writing; a release does."""
        with self._lock:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:
                raise StillWriting(f"{peer}: a transfer cannot be ended: {error!r}") from error

    def disconnect(self, peer: str) -> None:
        with self._lock:
            if self._peers.pop(peer, None) is not None and peer != self._name:
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception as error:
                    logger.debug("NIXL does not let go of %s: %s", peer, repr(error))

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        with self._lock:
            self._deregister()
            self._agent = None

    def _deregister(self) -> None:
        for region in self._regions:
            self._agent.deregister_memory(region)
        self._regions.clear()


def _make_current(device: torch.device) -> None:
    """This thread's CUDA context, which UCX takes as it is, becomes the device's."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()
