# SPDX-License-Identifier: Apache-2.0
"""The HTTP application of an engine.

`python -m vllm.entrypoints.openai.api_server --model M` is `vllm serve M`.
"""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from vllm import envs
from vllm.entrypoints.openai.cli_args import FrontEndArgs, import_middleware
from vllm.entrypoints.openai.compression import CompressedBodies, CompressedReplies
from vllm.entrypoints.openai.errors import install_handlers
from vllm.entrypoints.openai.middleware import (
    Authentication,
    BodySizeLimit,
    DirectSend,
    HeadRequests,
    HttpMetrics,
    QueueLimit,
    RequestIdHeader,
)
from vllm.entrypoints.openai.routes import (
    dev,
    generate,
    health,
    models,
    unsupported,
)
from vllm.entrypoints.openai.siblings import Siblings
from vllm.entrypoints.openai.state import Server, make_server
from vllm.entrypoints.tally import Counted, Tallies
from vllm.entrypoints.utils import most_running
from vllm.logger import init_logger
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.version import __version__

logger = init_logger(__name__)


def build_app(
    engine: AsyncLLM,
    args: FrontEndArgs,
    siblings: Siblings | None = None,
    tallies: Tallies | None = None,
) -> FastAPI:
    """The application that serves `engine`; wraps nothing that would buffer a stream.

    `siblings`, `tallies`: where other processes serve the same engine.
    """
    tallies = tallies or Tallies()
    server = make_server(engine, args, siblings, tallies)

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
    routers = _routers(args)
    for router in routers:
        app.include_router(router)
    install_handlers(app)
    _add_middleware(app, server, args, tallies, routers)
    return app


def _routers(args: FrontEndArgs) -> list[APIRouter]:
    """What this server answers."""
    routers = [module.router for module in (health, models, generate, unsupported)]
    with_info = args.enable_tokenizer_info_endpoint
    routers.append(generate.info_router if with_info else unsupported.no_tokenizer_info)
    if envs.VLLM_SERVER_DEV_MODE:
        logger.warning("VLLM_SERVER_DEV_MODE=1: development routes are open to every client")
        routers.append(dev.router)
    return routers


def _add_middleware(
    app: FastAPI,
    server: Server,
    args: FrontEndArgs,
    tallies: Tallies,
    routers: list[APIRouter],
) -> None:
    """Innermost first."""
    # Once as decompressed, and once as it arrives.
    app.add_middleware(BodySizeLimit, max_bytes=args.max_request_body_size)
    app.add_middleware(CompressedBodies)
    app.add_middleware(BodySizeLimit, max_bytes=args.max_request_body_size)
    if args.enable_server_load_tracking:
        app.add_middleware(server.load.wrap)
    if args.max_queued_requests is not None:
        app.add_middleware(
            QueueLimit,
            max_running=most_running(server.engine.vllm_config),
            max_queued=args.max_queued_requests,
            tally=tallies.of(Counted.GENERATING),
        )
    if keys := args.api_keys():
        app.add_middleware(Authentication, keys=keys)
    app.add_middleware(CompressedReplies)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
    )
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdHeader)
    found = (route for router in routers for route in router.routes)
    routes = [route for route in found if isinstance(route, APIRoute)]
    app.add_middleware(
        HttpMetrics,
        routes=frozenset(
            (route.path, method) for route in routes for method in route.methods or ()
        ),
    )
    app.add_middleware(HeadRequests)
    app.add_middleware(DirectSend, outermost=not args.middleware)
    for path in reversed(args.middleware):
        app.add_middleware(import_middleware(path))


def main() -> int:
    """Entry point without a subcommand."""
    from vllm.entrypoints.cli.main import main as cli_main

    return cli_main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
