# SPDX-License-Identifier: Apache-2.0
"""A whole server process around the fake engine: `python -m tests.entrypoints.fake_server FLAGS`.

FAKE_ENGINE selects a behaviour: `hang` generates two tokens and waits, `fail` does not start,
`slow` takes a while to start, `dropped` is told to stop where Python drops exceptions, `die` dies
half a second after the first request, `overtaken` starts while another server begins to listen at
the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.entrypoints.access_log import set_up_logging
from vllm.entrypoints.cli.main import report_failure
from vllm.entrypoints.launcher import serve
from vllm.entrypoints.listening import bound, listen
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags


class DyingEngine(FakeAsyncLLM):
    """Requests wait; the engine dies shortly after the first one and fails them all."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        asyncio.get_running_loop().call_later(0.5, setattr, self, "dead", True)
        while not self.dead:
            await asyncio.sleep(0.05)
        raise self.dead_error
        yield


class _Dropping:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


#: open until the process ends
_OTHER_SERVER = contextlib.ExitStack()


def make_engine(args: FrontEndArgs) -> FakeAsyncLLM:
    behaviour = os.environ.get("FAKE_ENGINE", "")
    if behaviour == "fail":
        raise RuntimeError("no such checkpoint\n  at /nowhere")
    if behaviour == "slow":
        print("starting", flush=True)
        for _ in range(6000):  # short sleeps: a signal just before a long one would wait for it
            time.sleep(0.01)
    if behaviour == "dropped":
        _Dropping()
    if behaviour == "overtaken":
        listen(_OTHER_SERVER.enter_context(bound(args)), args)
    engine = DyingEngine() if behaviour == "die" else FakeAsyncLLM()
    if behaviour == "hang":
        engine.hang_after = 2
    return engine


def main() -> int:
    parser = FlexibleArgumentParser()
    add_dataclass_flags(parser, FrontEndArgs, "Frontend")
    try:
        args = FrontEndArgs.from_cli_args(parser.parse_args())
        set_up_logging(args)
        with bound(args) as sock:
            return serve(
                sock, args, lambda: make_engine(args), lambda engine: build_app(engine, args)
            )
    except Exception as error:
        report_failure("serve", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
