# SPDX-License-Identifier: Apache-2.0
"""The proxy's process: its address, its signals and its exit status."""

import contextlib
import os
import signal
from collections.abc import Generator
from types import FrameType

import uvicorn

from vllm.entrypoints.http_protocol import StreamingProtocol
from vllm.entrypoints.proxy.app import build_app
from vllm.entrypoints.proxy.args import ProxyArgs
from vllm.logger import init_logger

logger = init_logger(__name__)

_EXIT_FORCED = 130


class ProxyServer(uvicorn.Server):
    """uvicorn that ends as `vllm serve` does. By itself it raises a signal again at the end, as if
    that had killed the process, which service managers take for a failure."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running requests finish, a second one ends the process at once."""
        name = signal.Signals(sig).name
        if self.should_exit:
            logger.warning("%s again: exiting at once", name)
            os._exit(_EXIT_FORCED)
        # Before the log line: a second signal may interrupt this handler anywhere.
        self.should_exit = True
        logger.info("%s: finishing running requests, no new ones", name)


def serve(args: ProxyArgs) -> int:
    """Run until a signal; returns the exit status."""
    config = uvicorn.Config(
        build_app(args),
        http=StreamingProtocol,
        ws="none",
        host=args.host,
        port=args.port,
        access_log=False,
    )
    ProxyServer(config).run()
    return 0
