# SPDX-License-Identifier: Apache-2.0
"""The pass over a model's source, at the same time as the model's steps."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

from vllm import decisions
from vllm.compilation.graph_safety.report import Report
from vllm.compilation.graph_safety.targets import Progress, check_model
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.batch_defaults import UsageContext
from vllm.utils.exit_status import how_it_ended
from vllm.utils.start_method import reason_not_to_fork

_WHAT = "pass over the source"
#: how often the process tells how far it is: what it tells fits in a pipe that nobody reads from
_TELLS_EVERY_S = 0.1


class SourcePass(Protocol):
    """A pass that has begun."""

    def poll(self) -> None:
        """Hand on how far it is. Raises what the pass has raised."""

    def report(self) -> Report:
        """Wait for its end. Raises what the pass has raised."""


@contextlib.contextmanager
def source_pass(args: EngineArgs, progress: Progress, *, beside: bool) -> Iterator[SourcePass]:
    """Begin `check_model` of a model as a server would run it. `beside`: in a process forked from
    this one, where it can be, which has ended after the block; otherwise before the block.

    Raises as `EngineArgs.create_engine_config` and `check_model` do, RuntimeError for a process
    that dies.
    """
    if not beside:
        yield _Ended(_report(args, progress))
        return
    # Asked before anything else looks at a GPU, after which no process can be forked.
    reason = reason_not_to_fork()
    if reason is not None:
        instead = "a process beside the steps"
        decisions.record(_WHAT, "before the steps", reason, instead_of=instead)
        yield _Ended(_report(args, progress))
        return
    started = _Forked(args, progress)
    try:
        # What is wrong with the flags is told here, and what was chosen for them.
        args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        yield started
    finally:
        started.close()


def _report(args: EngineArgs, progress: Progress) -> Report:
    return check_model(args.create_engine_config(UsageContext.OPENAI_API_SERVER), progress)


@dataclass(frozen=True)
class _Ended:
    """A pass that was made before."""

    found: Report

    def poll(self) -> None:
        """There is nothing to tell."""

    def report(self) -> Report:
        return self.found


class _Forked:
    """A pass in a process of its own."""

    def __init__(self, args: EngineArgs, progress: Progress) -> None:
        self._progress = progress
        self._found: Report | Exception | None = None
        self._answers, theirs = get_context("fork").Pipe(duplex=False)
        self._process: BaseProcess = get_context("fork").Process(
            target=_run, args=(args, theirs, self._answers), name=_WHAT, daemon=True
        )
        self._process.start()
        theirs.close()

    def poll(self) -> None:
        while self._found is None and self._answers.poll():
            self._take()
        if isinstance(self._found, Exception):
            raise self._found

    def report(self) -> Report:
        while self._found is None:
            self._take()
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._answers.close()

    def _take(self) -> None:
        try:
            answer: int | Report | Exception = self._answers.recv()
        except EOFError:
            self._process.join()
            how = how_it_ended(self._process.exitcode)
            answer = RuntimeError(f"the process of the {_WHAT} died ({how})")
        if not isinstance(answer, int):
            self._found = answer
            return
        for _ in range(answer):
            self._progress(_WHAT)


def _run(args: EngineArgs, answers: Connection, foreign: Connection) -> None:
    """In the new process: numbers of functions that were walked, then the report or what was
    raised."""
    foreign.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told, walked = time.monotonic(), 0

    def progress(name: str) -> None:
        nonlocal told, walked
        walked += 1
        if time.monotonic() - told >= _TELLS_EVERY_S:
            answers.send(walked)
            told, walked = time.monotonic(), 0

    answer: Report | Exception
    logger = logging.getLogger("vllm")
    try:
        # The process that is beside makes the same configuration, and tells what is said of it.
        logger.setLevel(logging.CRITICAL)
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        logger.setLevel(logging.WARNING)
        answer = check_model(config, progress)
        answers.send(walked)
    except Exception as error:
        answer = that_travels(error)
    answers.send(answer)


def that_travels(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
