# SPDX-License-Identifier: Apache-2.0
"""The first host's side of the others: they come, agree, and have workers from then on."""

from __future__ import annotations

import pickle
import selectors
import time

from vllm import decisions
from vllm.config import VllmConfig
from vllm.distributed.rendezvous import listen
from vllm.exceptions import StartTimeoutError, VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.executor.device_checks import check_equal_devices, device_names
from vllm.v1.executor.message_socket import MessageSocket
from vllm.v1.executor.node_agreement import agreement, differences
from vllm.v1.executor.node_messages import TOLD_TO_STOP, Hello, NodeSetup, Tag
from vllm.v1.executor.remote_workers import RemoteWorkers
from vllm.v1.executor.station import WorkerDiedError, failure_of
from vllm.v1.executor.worker_process import WorkerPlan

logger = init_logger(__name__)

#: who connects says hello this soon, or is a stranger
_HELLO_S = 5.0


class NodeLink(RemoteWorkers):
    """The workers of another host."""

    def __init__(self, connection: MessageSocket, hello: Hello, ranks: range) -> None:
        self.node_rank = hello.node_rank
        self.devices = hello.devices
        last = f"s {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f" {ranks[0]}"
        super().__init__(
            connection, ranks, f"node {self.node_rank} ({connection.peer}, rank{last})"
        )


def gather_nodes(config: VllmConfig, plan: WorkerPlan) -> list[NodeLink]:
    """Wait for the hosts 1 to `--nnodes` less 1 and give each its workers.

    Raises `VLLMValidationError` for one whose settings differ, and `StartTimeoutError` naming those
    that do not come.
    """
    parallel = config.parallel_config
    gathering = _Gathering(config)
    try:
        links = gathering.run()
    except BaseException as error:
        gathering.refuse(failure_of(error) or TOLD_TO_STOP)
        raise
    finally:
        gathering.listener.close()
    for link in links:
        setup = Tag.SETUP.of(pickle.dumps(NodeSetup(plan, link.ranks)))
        link.say(setup, patience_s=parallel.hosts_timeout_s)
    names = "; ".join(link.name for link in links)
    decisions.record(
        "hosts", f"{parallel.nnodes}, {parallel.local_world_size} workers each", f"others: {names}"
    )
    return links


class _Gathering:
    """Hosts that have come so far."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._parallel = config.parallel_config
        self._ours = agreement(config)
        self._links: list[NodeLink] = []
        parallel = self._parallel
        self._place = f"{parallel.master_addr}:{parallel.master_port}"
        self.listener = listen(parallel.master_addr, parallel.master_port)

    def run(self) -> list[NodeLink]:
        timeout_s = self._parallel.hosts_timeout_s
        deadline = time.monotonic() + timeout_s
        missing = set(range(1, self._parallel.nnodes))
        logger.info("waiting at %s for %d more hosts", self._place, len(missing))
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while missing:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise self._too_late(missing, timeout_s)
                for key, _ in events:
                    if key.data is not None:  # says nothing before it is asked
                        raise WorkerDiedError(f"{key.data.name} left before all hosts had come")
                    link = self._accept()
                    if link is not None:
                        missing.remove(link.node_rank)
                        selector.register(link.sources[0], selectors.EVENT_READ, link)
        links = sorted(self._links, key=lambda link: link.node_rank)
        names = device_names(self._config)
        for link in links:
            names += link.devices
        check_equal_devices(names, self._parallel.tensor_parallel_size)
        return links

    def _too_late(self, missing: set[int], timeout_s: float) -> StartTimeoutError:
        nodes = ", ".join(map(str, sorted(missing)))
        return StartTimeoutError(
            f"node {nodes} has not come to {self._place} in {timeout_s:g} s "
            "(--distributed-timeout-seconds); start `vllm serve MODEL --headless --node-rank "
            f"{min(missing)}` there, with this host's other flags"
        )

    def _accept(self) -> NodeLink | None:
        """The node that has connected, None for a stranger."""
        accepted, (peer, *_) = self.listener.accept()
        connection = MessageSocket(accepted, peer)
        try:
            hello = Hello.decode(connection.receive(_HELLO_S))
        except (TimeoutError, EOFError):
            hello = None
        if hello is None:
            logger.warning("%s connected to %s and is no node of an engine", peer, self._place)
            connection.close()
            return None
        node_rank, size = hello.node_rank, self._parallel.local_world_size
        link = NodeLink(connection, hello, range(node_rank * size, (node_rank + 1) * size))
        error = differences(self._ours, hello.agreement, node_rank)
        if error is not None:
            error = f"{error}; all hosts of an engine need the same flags and versions"
        elif node_rank in (0, *(one.node_rank for one in self._links)):
            error = f"--node-rank {node_rank} is another host's, and {peer} has it, too"
        self._links.append(link)
        if error is not None:
            raise VLLMValidationError(error, "node_rank", node_rank)
        logger.info("%s has come", link.name)
        return link

    def refuse(self, reason: str) -> None:
        """Tell those who have come that there will be no engine."""
        for link in self._links:
            link.begin_end(reason)
            link.close()
