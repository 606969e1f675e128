# SPDX-License-Identifier: Apache-2.0
"""What the core sends on its way to the streams of an asynchronous engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_client import AsyncClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_stream import OutputStream, Wakes
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor, ProcessedOutputs
    from vllm.v1.metrics.loggers import StatLoggerManager

logger = init_logger(__name__)

#: outputs handled before other tasks of the event loop get a turn, and logprobs that take as long
#: as one output if their tokens' texts are new
_CHUNK = 128
_LOGPROBS_PER_OUTPUT = 2
#: messages of the core whose tokens go out together when they come faster than they are handled
_MOST_TOGETHER = 8


def turns(outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    """`outputs` in parts that are handled in one turn of the event loop."""
    part: list[EngineCoreOutput] = []
    weight = 0
    for output in outputs:
        wire = output.new_logprobs
        own = 1 if wire is None else 1 + wire.rows * wire.width // _LOGPROBS_PER_OUTPUT
        if part and weight + own > _CHUNK:
            yield part
            part, weight = [], 0
        part.append(output)
        weight += own
    if part:
        yield part


class OutputHandler:
    """A task that handles the core's messages until the engine is dead, when `streams`, those of
    the running requests, end with an error."""

    def __init__(
        self,
        engine_core: AsyncClient,
        output_processor: OutputProcessor,
        loggers: StatLoggerManager | None,
    ) -> None:
        self._engine_core = engine_core
        self._output_processor = output_processor
        self._loggers = loggers
        self.streams: set[OutputStream] = set()
        self.wakes = Wakes()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead; None while it runs. A new one: it is raised more than once."""
        error = self._engine_core.dead if self._error is None else self._error
        if error is None:
            return None
        if isinstance(error, EngineDeadError):
            return EngineDeadError(error.cause)
        return EngineDeadError(f"{type(error).__name__}: {error}")

    def start(self) -> None:
        """From now on outputs are handled, on the running event loop; may be called again."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._handle_outputs())

    def abort(self, request_ids: list[str]) -> None:
        """End requests by the callers' ids; their streams end with finish reason "abort"."""
        ended = IterationStats()
        aborted, _ = self._output_processor.abort_requests(request_ids, ended)
        self._tell_of(aborted, ended)

    def forget(self, stream: OutputStream) -> None:
        """Nobody waits for the stream any more: forget its requests and tell the core."""
        ended = IterationStats()
        self._tell_of(self._output_processor.drop_requests(stream.request_ids, ended), ended)

    def _tell_of(self, aborted: list[str], ended: IterationStats) -> None:
        if not aborted or self.dead_error is not None:
            return
        if self._loggers is not None:
            self._loggers.record_aborted(aborted, ended)
        self._engine_core.abort_requests(aborted)

    def stop(self) -> None:
        """The core is shut down."""
        self._fail(EngineDeadError("it was shut down") if self._error is None else self._error)
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        dead = self.dead_error
        assert dead is not None
        for stream in self.streams:
            stream.fail(dead)

    async def _handle_outputs(self) -> None:
        try:
            while True:
                await self._handle_all(await self._engine_core.get_outputs())
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("handling the engine's outputs failed")
            self._fail(error)

    async def _handle_all(self, waiting: list[EngineCoreOutputs | EngineDeadError]) -> None:
        """Messages that came while others were handled: behind like this, consumers take the
        tokens of several steps at once."""
        for first in range(0, len(waiting), _MOST_TOGETHER):
            together = waiting[first : first + _MOST_TOGETHER]
            try:
                for outputs in together:
                    if isinstance(outputs, EngineDeadError):
                        raise outputs
                    if outputs is not together[-1]:
                        self.wakes.hold()
                    await self._handle(outputs)
            finally:
                self.wakes.release()

    async def _handle(self, outputs: EngineCoreOutputs) -> None:
        iteration = IterationStats() if self._loggers is not None else None
        plain, outputs.plain = outputs.plain, None
        # First tokens are among these.
        for part in turns(outputs.outputs):
            # Before the first one, too: messages may be waiting in a row.
            await asyncio.sleep(0)
            outputs.outputs = part
            self._finish_with(self._output_processor.process_outputs(outputs, iteration))
        rows = []
        if plain is not None:
            rows = self._output_processor.plain_rows(plain, outputs.engine_index)
        for first in range(0, len(rows), _CHUNK):
            await asyncio.sleep(0)
            some = rows[first : first + _CHUNK]
            self._finish_with(
                self._output_processor.process_plain(some, outputs.timestamp, iteration)
            )
        if self._loggers is not None and iteration is not None:
            self._loggers.record(outputs.scheduler_stats, iteration, outputs.engine_index)

    def _finish_with(self, processed: ProcessedOutputs) -> None:
        self._engine_core.abort_requests(processed.aborts)
        self._engine_core.stop_requests(processed.stops)
