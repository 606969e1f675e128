# SPDX-License-Identifier: Apache-2.0
"""An engine of two workers on two hosts, which here are two trees of processes."""

from __future__ import annotations

import copy
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import psutil

from tests.ports import free_port
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launcher import stop_start_at_signals
from vllm.utils.start_method import start_method
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.node import run_node

#: longest wait for a process on a busy machine
WAIT_S = 60


class Node:
    """The host 1, or another one, as a process."""

    def __init__(self, config: VllmConfig, node_rank: int = 1, **parallel: Any) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.node_rank = node_rank
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        # A forked process waits for ever for the threads that OpenMP had in this one.
        assert start_method("node") == "fork"
        context = multiprocessing.get_context("fork")
        self._result, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(config, theirs))
        self.process.start()
        theirs.close()

    def result(self) -> BaseException | None:
        """How it has ended: without an error, or with which."""
        assert self._result.poll(WAIT_S), "the node does not end"
        error: BaseException | None = self._result.recv()
        self.process.join(WAIT_S)
        return error

    def tree(self) -> list[psutil.Process]:
        """The process and its workers."""
        one = psutil.Process(self.process.pid)
        return [one, *one.children()]

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(WAIT_S)


def _run(config: VllmConfig, result: Connection) -> None:
    stop_start_at_signals()
    try:
        run_node(config)
        result.send(None)
    except BaseException as error:
        result.send(error)


class Hosts:
    """Makes the parts of one engine of two workers on two hosts."""

    def __init__(self, **parallel: Any) -> None:
        self.port = free_port()
        sizes = {"tensor_parallel_size": 2, "nnodes": 2, **parallel}
        args = EngineArgs(model=str(tiny_model("llama")), master_port=self.port, **sizes)
        self.config = args.create_engine_config()
        self.nodes: list[Node] = []
        self.executors: list[MultiprocExecutor] = []

    def node(self, *args: Any, **parallel: Any) -> Node:
        self.nodes.append(Node(self.config, *args, **parallel))
        return self.nodes[-1]

    def executor(self) -> MultiprocExecutor:
        self.executors.append(MultiprocExecutor(self.config))
        return self.executors[-1]

    def both(self) -> tuple[MultiprocExecutor, Node]:
        node = self.node()
        return self.executor(), node

    def end(self) -> None:
        for executor in self.executors:
            executor.shutdown()
        for node in self.nodes:
            node.end()
