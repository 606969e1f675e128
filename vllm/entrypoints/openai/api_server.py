# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: application, engine and listening socket brought together.

`python -m vllm.entrypoints.openai.api_server --model M` is `vllm serve M`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from vllm import envs
from vllm.entrypoints.access_log import log_config
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.errors import install_handlers
from vllm.entrypoints.openai.http_metrics import HttpMetrics
from vllm.entrypoints.openai.middleware import Authentication, BodySizeLimit, RequestIdHeader
from vllm.entrypoints.openai.queue_limit import QueueLimit
from vllm.entrypoints.openai.routes import (
    abort,
    chat,
    completions,
    dev,
    health,
    inference,
    models,
    sleep,
    tokenize,
    unsupported,
)
from vllm.entrypoints.openai.state import Server, make_server
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(__name__)


def build_app(engine: AsyncLLM, args: FrontEndArgs) -> FastAPI:
    """The application that serves `engine`; wraps nothing that would buffer a stream."""
    server = make_server(engine, args)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        server.renderer.close()

    app = FastAPI(
        title="vLLM server",
        version=__version__,
        lifespan=lifespan,
        docs_url=None if args.disable_fastapi_docs else "/docs",
        redoc_url=None,
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",
    )
    # FastAPI wants it from the HTTP server, but uvicorn would add it to every path, also to those
    # that a proxy has not stripped.
    app.root_path = args.root_path or ""
    app.state.server = server
    app.state.log_error_stack = args.log_error_stack
    _include_routes(app, args)
    install_handlers(app)
    _add_middleware(app, server, args)
    return app


def _include_routes(app: FastAPI, args: FrontEndArgs) -> None:
    for module in (health, models, completions, chat, inference, abort, tokenize, unsupported):
        app.include_router(module.router)
    if args.enable_tokenizer_info_endpoint:
        app.include_router(tokenize.info_router)
    if envs.VLLM_SERVER_DEV_MODE:
        logger.warning("VLLM_SERVER_DEV_MODE=1: development routes are open to every client")
        app.include_router(dev.router)
        app.include_router(sleep.router)


def _add_middleware(app: FastAPI, server: Server, args: FrontEndArgs) -> None:
    """Innermost first."""
    app.add_middleware(BodySizeLimit, max_bytes=args.max_request_body_size)
    if args.enable_server_load_tracking:
        app.add_middleware(server.load.wrap)
    if args.max_queued_requests is not None:
        app.add_middleware(
            QueueLimit,
            max_running=server.engine.vllm_config.scheduler_config.max_num_seqs,
            max_queued=args.max_queued_requests,
        )
    if keys := args.api_keys():
        app.add_middleware(Authentication, keys=keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
    )
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdHeader)
    app.add_middleware(HttpMetrics)
    for path in reversed(args.middleware):
        app.add_middleware(_import_middleware(path))


def _import_middleware(path: str) -> Any:
    from vllm.utils.dotted import resolve_class

    try:
        return resolve_class(path)
    except ValueError as error:
        raise VLLMValidationError(f"--middleware: {error}", "middleware", path) from None


def run_server(namespace: argparse.Namespace) -> int:
    """Serve until a signal or the engine's death; returns the process's exit status."""
    startup_phases.begin_with_process("import")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launcher import bind, check_certificates, serve

    args = FrontEndArgs.from_cli_args(namespace)
    engine_args = AsyncEngineArgs.from_cli_args(namespace)
    # These fail in milliseconds; loading a model first would hide the mistake for minutes.
    load_chat_template(args.chat_template)
    log_config(args)
    check_certificates(args)
    for path in args.middleware:
        _import_middleware(path)
    sock = bind(args)

    def make_engine() -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        startup_phases.end("import")
        return AsyncLLM.from_engine_args(engine_args)

    return serve(sock, args, make_engine, lambda engine: build_app(engine, args))


def main() -> int:
    """Entry point without a subcommand."""
    from vllm.entrypoints.cli.main import main as cli_main

    return cli_main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
