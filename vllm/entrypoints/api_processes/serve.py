# SPDX-License-Identifier: Apache-2.0
"""Serving one engine with several API processes."""

import math
import os
import socket
from dataclasses import replace

from vllm.config import VllmConfig
from vllm.entrypoints.api_processes.supervisor import Supervisor
from vllm.entrypoints.listening import bind_another
from vllm.entrypoints.openai.cli_args import AUTO, FrontEndArgs
from vllm.entrypoints.utils import most_running
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

#: running requests whose streams one process serves without being busy half of the time
_REQUESTS_EACH = 256
#: cores that the engine core, its workers and the system need
_OTHER_CORES = 4
_MOST = 8


def serve_together(
    first: socket.socket,
    args: FrontEndArgs,
    vllm_config: VllmConfig,
    executor_class: type[Executor] | None = None,
    log_stats: bool = True,
) -> int:
    """Serve `vllm_config`, which is resolved, at the address of `first` (from `bound`,
    shared); returns the exit status.

    Every process has a socket of its own at the same TCP port, over which the system spreads the
    connections; all accept from the same Unix socket.
    """
    count = choose_count(args.api_server_count, vllm_config)
    sockets = [first]
    try:
        if args.uds:
            sockets *= count
        else:
            args = replace(args, port=first.getsockname()[1])
            sockets += [bind_another(args) for _ in range(count - 1)]
        logger.info("%d API processes at %s", count, args.uds or f"port {args.port}")
        return Supervisor(sockets, args, vllm_config, executor_class, log_stats).run()
    finally:
        for sock in set(sockets) - {first}:
            sock.close()


def choose_count(asked: int, vllm_config: VllmConfig, num_cores: int | None = None) -> int:
    """`asked`, or for `AUTO` a number that is recorded as a decision."""
    if asked != AUTO:
        return asked
    num_cores = num_cores or len(os.sched_getaffinity(0))
    most_requests = most_running(vllm_config)
    useful = math.ceil(most_requests / _REQUESTS_EACH)
    count = max(1, min(useful, num_cores - _OTHER_CORES, _MOST))
    why = (
        f"one per {_REQUESTS_EACH} of {most_requests} requests (--max-num-seqs of all replicas), "
        f"on {num_cores} cores of which the engine needs {_OTHER_CORES}"
    )
    vllm_config.decisions.record("API server processes", count, why)
    return count
