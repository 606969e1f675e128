# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: what can be wrong with flags and files first, then the engine, then the routes.

Routes are imported while the engine starts, so this module imports none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
from typing import TYPE_CHECKING

from vllm import envs
from vllm.entrypoints.access_log import set_up_logging
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.openai.cli_args import FrontEndArgs, import_middleware
from vllm.entrypoints.restart import restart
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.utils.imports import gc_paused
from vllm.v1.metrics.prometheus import check_multiprocess_directory

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

_APPLICATION = "vllm.entrypoints.openai.api_server"


def run_server(namespace: argparse.Namespace) -> int:
    """Serve until a signal or the engine's death; returns the process's exit status."""
    startup_phases.begin_with_process(startup_phases.IMPORT)
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = FrontEndArgs.from_cli_args(namespace)
    engine_args = AsyncEngineArgs.from_cli_args(namespace)
    # These fail in milliseconds; loading a model first would hide the mistake for minutes.
    check_node_role(args, engine_args)
    check_failure_policy(args)
    check_multiprocess_directory()
    status = _run(args, engine_args)
    if status != 0 and args.on_failure == "restart":
        restart()
    return status


def _run(args: FrontEndArgs, engine_args: AsyncEngineArgs) -> int:
    if args.headless:
        return _run_headless(args, engine_args)
    with _forking(args, engine_args):
        return _run_api(args, engine_args)


def _forking(
    args: FrontEndArgs, engine_args: AsyncEngineArgs
) -> contextlib.AbstractContextManager[None]:
    """For more processes than this one and an engine core: what they are forked from."""
    from vllm.utils.fork_server import fork_server
    from vllm.v1.engine import spare_process

    if args.api_server_count != 1:
        from vllm.entrypoints.api_processes.process import APPLICATION

        return fork_server(APPLICATION, spare_process.connections())
    if engine_args.data_parallel_size > 1 and engine_args.data_parallel_rank is None:
        return fork_server((), spare_process.connections())
    return contextlib.nullcontext()


def _run_api(args: FrontEndArgs, engine_args: AsyncEngineArgs) -> int:
    """Serve, with as many API processes as asked."""
    from vllm.entrypoints.launcher import check_certificates, serve, stop_start_at_signals
    from vllm.entrypoints.listening import bound

    stop_start_at_signals()
    load_chat_template(args.chat_template)
    set_up_logging(args)
    check_certificates(args)
    for path in args.middleware:
        import_middleware(path)
    if args.api_server_count != 1:
        return _run_several(args, engine_args)

    def make_engine() -> AsyncLLM:
        with gc_paused():
            from vllm.v1.engine.async_llm import AsyncLLM
        startup_phases.end(startup_phases.IMPORT)
        return AsyncLLM.from_engine_args(engine_args, meanwhile=_import_application)

    def make_app(engine: AsyncLLM) -> FastAPI:
        from vllm.entrypoints.openai.api_server import build_app

        return build_app(engine, args)

    with bound(args) as sock:
        return serve(sock, args, make_engine, make_app)


def check_failure_policy(args: FrontEndArgs) -> None:
    """`VLLMValidationError` where a server is to go on after its engine's death in two ways."""
    if args.on_failure == "restart" and envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
        raise VLLMValidationError(
            "--on-failure restart and VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1, which serves errors after "
            "the engine's death, exclude each other; unset one of them",
            "on_failure",
        )


def check_node_role(args: FrontEndArgs, engine_args: AsyncEngineArgs) -> None:
    """`VLLMValidationError` unless `--headless` is given on all hosts but the first; of a rank that
    no host has, `ParallelConfig` says so."""
    nodes, node_rank = engine_args.nnodes, engine_args.node_rank
    if args.headless and nodes == 1:
        raise VLLMValidationError(
            "--headless is for a host that has workers only, beside node 0 with the API: it needs "
            "--nnodes and --node-rank. For replicas start one server per replica",
            "headless",
        )
    if args.headless and node_rank == 0:
        raise VLLMValidationError(
            "--headless with --node-rank 0: that host has the API; leave out --headless here, or "
            f"give this host's --node-rank, 1 to {nodes - 1}",
            "headless",
        )
    if 0 < node_rank < nodes and not args.headless:
        raise VLLMValidationError(
            f"--node-rank {node_rank}: the API is on node 0; add --headless here",
            "node_rank",
            node_rank,
        )


def _run_headless(args: FrontEndArgs, engine_args: AsyncEngineArgs) -> int:
    """Workers for another host, until its engine is stopped; 1 where its failure is no error."""
    from vllm.engine.batch_defaults import UsageContext
    from vllm.entrypoints.cli.types import CommandError
    from vllm.entrypoints.launcher import stop_start_at_signals
    from vllm.v1.executor.node import NodeEndedError, NodeRefusedError, run_node

    stop_start_at_signals()
    config = engine_args.create_engine_config(UsageContext.API_SERVER)
    try:
        with config.decisions.current():
            run_node(config)
    except (NodeEndedError, NodeRefusedError, TimeoutError) as error:
        if args.on_failure == "stop" or not isinstance(error, NodeEndedError):
            raise CommandError(str(error)) from error
        logger.error("%s", error)
        return 1
    return 0


def _run_several(args: FrontEndArgs, engine_args: AsyncEngineArgs) -> int:
    """With more than one API process, or as many as turn out to be of use."""
    from vllm.engine.batch_defaults import UsageContext
    from vllm.entrypoints.api_processes.serve import serve_together
    from vllm.entrypoints.listening import bound

    # Before the model is looked at: an address that is taken is a mistake found in milliseconds.
    with bound(args, shared=True) as first:
        startup_phases.end(startup_phases.IMPORT)
        config = engine_args.create_engine_config(UsageContext.API_SERVER)
        log_stats = not config.observability_config.disable_log_stats
        return serve_together(first, args, config, log_stats=log_stats)


@startup_phases.startup_phase("import server")
def _import_application() -> None:
    with gc_paused():
        importlib.import_module(_APPLICATION)
    # Looking at all that is imported takes a quarter of a second: now, while the engine starts.
    gc.collect()
    gc.freeze()
