# SPDX-License-Identifier: Apache-2.0
"""A worker in a Ray actor: what the actor does, from its start to the end of the engine.

Imports nothing heavy: the actor first takes over its driver's environment.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.executor.message_socket import MessageSocket

#: variables that go from the driver to the workers begin with one of these
_CARRIED = (
    *("VLLM_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TORCH_", "TRITON_", "NCCL_", "GLOO_"),
    *("UCX_", "OMP_", "MKL_", "PYTHONHASHSEED"),
)
#: a host's own, and a secret that workers have no use for
_NOT_CARRIED = frozenset({"VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_API_KEY"})


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers take over from the driver's environment."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_CARRIED) and name not in _NOT_CARRIED
    }


class RayWorker:
    """The class of the actors."""

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)

    def place(self) -> tuple[str, str, int]:
        """The address and the identifier of the Ray node, and the process there."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return str(ray.util.get_node_ip_address()), str(node), os.getpid()

    def run(self, setup: bytes, rank: int, address: tuple[str, int], secret: str) -> None:
        """Be the worker of `rank` until the driver at `address` says so or is gone. `setup`: a
        pickled `WorkerPlan`."""
        from vllm.v1.executor.message_socket import MessageSocket, interface_of
        from vllm.v1.executor.node_agreement import versions
        from vllm.v1.executor.worker_process import WorkerSetup, run_worker

        connection = MessageSocket(socket.create_connection(address))
        hello = {"secret": secret, "rank": rank, "device": _device_name(), "versions": versions()}
        connection.send(json.dumps(hello).encode(), lambda: None)
        interface = interface_of(connection.own_address)
        start = WorkerSetup(pickle.loads(setup), rank, 0, os.getppid(), interface)
        run_worker(start, _Messages(connection), _Answers(connection, rank))


def _device_name() -> str:
    from vllm.platforms import current_platform

    return current_platform.get_device_name()


class _Messages:
    """What a worker's `Inbox` takes."""

    def __init__(self, connection: MessageSocket) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        from vllm.v1.executor.node_messages import Tag
        from vllm.v1.executor.worker_process import Kind

        message = self._connection.receive()
        if message[0] == Tag.END:
            return pickle.dumps((Kind.STOP, None))
        return message[1:]


class _Answers:
    """Where a worker's `Outbox` leaves them."""

    def __init__(self, connection: MessageSocket, rank: int) -> None:
        self._connection = connection
        self._rank = rank.to_bytes(4, "little")

    def send_bytes(self, answer: bytes) -> None:
        from vllm.v1.executor.node_messages import Tag

        self._connection.send(Tag.ANSWER.of(self._rank + answer), lambda: None)

    def close(self) -> None:
        self._connection.close()
