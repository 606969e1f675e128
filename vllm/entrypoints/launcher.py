# SPDX-License-Identifier: Apache-2.0
"""The server process: its socket, its signals, its engine and its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Generator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm import decisions, envs
from vllm.entrypoints.listening import BACKLOG, listen, remove_own_files
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.restart import note_stop
from vllm.entrypoints.tally import Counted, Tallies
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.utils.imports import short_turns

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from vllm.entrypoints.openai.cli_args import FrontEndArgs
    from vllm.v1.engine.async_llm import AsyncLLM


logger = init_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: seconds between looks at the engine's health
_WATCH_INTERVAL_S = 0.25
#: seconds that failed requests get to send their error after the engine's death
_DEATH_GRACE_S = 5
_EXIT_FORCED = 130
#: signals that were to unwind the start: Python drops what is raised in a finaliser or in the
#: callback of a weak reference, of which imports run many
_told_to_stop: list[int] = []
#: Every step makes some objects per stream, all of which live until it has been sent: by default
#: each step would look for garbage among them, and now and then among those of all requests.
_GC_THRESHOLDS = (50_000, 20, 50)
#: open files that tens of thousands of streams need; systems often start processes with 1,024
_OPEN_FILES = 65536
#: seconds that cancelled requests get to tell their clients
_LAST_WORDS_S = 2.0


def raise_open_file_limit() -> None:
    """Lift the soft limit of this process towards the hard one, which only root may pass."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    decisions.PROCESS.record("open file limit", wanted, "every connection is an open file", soft)


def check_certificates(args: FrontEndArgs) -> None:
    """Raise `VLLMValidationError` for TLS files or options that cannot be loaded."""
    if not args.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        context.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers:
            context.set_ciphers(args.ssl_ciphers)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise VLLMValidationError(
            f"TLS cannot be set up from --ssl-certfile {args.ssl_certfile} and the other --ssl "
            f"flags: {error}",
            "ssl_certfile",
        ) from None


def serve(
    sock: socket.socket,
    args: FrontEndArgs,
    make_engine: Callable[[], AsyncLLM],
    make_app: Callable[[AsyncLLM], FastAPI],
) -> int:
    """Load the engine, serve on `sock`, and return the exit status.

    The first SIGTERM or SIGINT drains, a second one exits at once. 0 after a clean stop, 1 after
    the engine's death; a failing start raises.
    """
    stop_start_at_signals()
    return run_server_loop(sock, args, make_engine, make_app, Tallies())


def run_server_loop(
    sock: socket.socket,
    args: FrontEndArgs,
    make_engine: Callable[[], AsyncLLM],
    make_app: Callable[[AsyncLLM], FastAPI],
    tallies: Tallies,
    take_stop: Callable[[Callable[[], None]], None] | None = None,
) -> int:
    """As `serve`, in a process that has its signals; `make_engine` and `make_app` run on the event
    loop.

    `take_stop` is given what makes the server finish, as the first signal does.
    """
    # Templates and bodies are parsed in threads, and the event loop must not wait for them.
    with short_turns():
        return uvloop.run(_serve(sock, args, make_engine, make_app, tallies, take_stop))


def stop_start_at_signals() -> None:
    """Until the event loop handles signals, they unwind the start."""
    for number in _SIGNALS:
        signal.signal(number, _stop_starting)


def _stop_starting(number: int, frame: object) -> NoReturn:
    """Before the event loop handles signals: unwind, so that the engine's children are stopped."""
    _told_to_stop.append(number)
    raise SystemExit(128 + number)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would raise the signal again at the end.

    While it drains it still listens, and `app` refuses what comes: a client that is told so knows
    more than one whose connection fails.
    """

    def __init__(self, app: FastAPI, args: FrontEndArgs, tallies: Tallies) -> None:
        self._gate = ShutdownGate(app)
        super().__init__(_uvicorn_config(self._gate, args, tallies))

    def finish(self) -> None:
        """Let running requests finish, then end."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets running requests finish, refusing new ones; then waits for the last words of those
        that outlasted the shutdown timeout."""
        began = time.monotonic()
        allowed_s = self.config.timeout_graceful_shutdown or 0
        self._gate.close()
        await self._gate.drained(allowed_s)
        left_s = allowed_s - (time.monotonic() - began)
        self.config.timeout_graceful_shutdown = max(0, math.ceil(left_s))
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)


async def _serve(
    sock: socket.socket,
    args: FrontEndArgs,
    make_engine: Callable[[], AsyncLLM],
    make_app: Callable[[AsyncLLM], FastAPI],
    tallies: Tallies,
    take_stop: Callable[[Callable[[], None]], None] | None,
) -> int:
    raise_open_file_limit()
    engine = make_engine()
    startup_phases.begin("server ready")
    try:
        server = _Server(make_app(engine), args, tallies)
        # What start-up allocated stays for good; collections need not look at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        _install_signals(server, engine)
        if take_stop is not None:
            take_stop(server.finish)
        listen(sock, args)
        helpers = [asyncio.create_task(_watch(server, engine))]
        if args.enable_ssl_refresh and args.ssl_certfile and args.ssl_keyfile:
            helpers.append(asyncio.create_task(refresh_certificates(server.config)))
        where = args.uds or f"{args.host or '0.0.0.0'}:{sock.getsockname()[1]}"
        logger.info("listening on %s", where)
        await server.serve(sockets=[sock])
        for task in helpers:
            task.cancel()
        return 1 if engine.errored else 0
    finally:
        engine.shutdown()


def _uvicorn_config(app: ASGIApp, args: FrontEndArgs, tallies: Tallies) -> uvicorn.Config:
    from vllm.entrypoints.http_protocol import StreamingProtocol, limited_protocol

    open_ones = tallies.of(Counted.CONNECTIONS)
    most = args.max_connections
    ciphers: dict[str, Any] = {"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}
    return uvicorn.Config(
        app,
        http=limited_protocol(most, open_ones) if most else StreamingProtocol,
        ws="none",
        backlog=BACKLOG,
        log_level=args.uvicorn_log_level,
        log_config=None,  # the process did, as it began: `set_up_logging`
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(args.shutdown_timeout),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        **ciphers,
    )


def _install_signals(server: uvicorn.Server, engine: AsyncLLM) -> None:
    """Plain handlers, not the loop's: they run even while shutting down blocks the loop.

    Ends a start that has gone on after a signal.
    """

    def stop(number: int, frame: object) -> None:
        note_stop()
        name = signal.Signals(number).name
        if server.should_exit:
            logger.warning("%s again: exiting at once", name)
            with contextlib.suppress(Exception):
                engine.shutdown(timeout=0)
            remove_own_files()
            os._exit(_EXIT_FORCED)
        # Before the log line: a second signal may interrupt this handler anywhere.
        server.should_exit = True
        logger.info("%s: finishing running requests, no new ones", name)

    for number in _SIGNALS:
        signal.signal(number, stop)
    if _told_to_stop:
        raise SystemExit(128 + _told_to_stop[0])


async def _watch(server: uvicorn.Server, engine: AsyncLLM) -> None:
    """Stop serving soon after the engine's death, when pending requests have had their error."""
    while not engine.errored:
        await asyncio.sleep(_WATCH_INTERVAL_S)
    if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
        logger.error("the engine died; serving errors (VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1)")
        return
    logger.error("the engine died, stopping the server: %s", engine.dead_error)
    server.config.timeout_graceful_shutdown = _DEATH_GRACE_S
    server.should_exit = True


#: seconds between looks at the certificate
_RENEWED_S = 5.0


async def refresh_certificates(config: uvicorn.Config, interval_s: float = _RENEWED_S) -> None:
    """Load key and certificate again whenever a file changes; a bad pair keeps the old one."""
    certificate, key = str(config.ssl_certfile), str(config.ssl_keyfile)
    seen = _stamp(certificate, key)
    while True:
        await asyncio.sleep(interval_s)
        stamp = _stamp(certificate, key)
        if stamp == seen or config.ssl is None:
            continue
        try:
            config.ssl.load_cert_chain(certificate, key, config.ssl_keyfile_password)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the changed certificate cannot be loaded yet: %s", error)
            continue
        seen = stamp
        logger.info("loaded the changed certificate %s", certificate)


def _stamp(*paths: str) -> tuple[float | None, ...]:
    """Modification times; None for a file that is just being replaced."""
    return tuple(os.stat(p).st_mtime if os.path.exists(p) else None for p in paths)


_REFUSAL = APIError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "ServiceUnavailable",
    "The server is shutting down and takes no new requests.",
)


class ShutdownGate:
    """Open, it counts the requests in `app`; closed, it answers 503 to every new one, probes of
    health among them, so that balancers send the rest elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._closed = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """From now on refuse."""
        self._closed = True

    async def drained(self, timeout_s: float) -> None:
        """Wait until no request runs, or for `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._closed:
            # The body is unread, so the connection cannot carry another request.
            await _REFUSAL.response({"connection": "close"})(scope, receive, send)
            return
        self._num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
