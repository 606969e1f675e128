# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine under the server: one stream of outputs per request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import startup_phases
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient, AttachedClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_stream import OutputStream, TakeText, Wakes
from vllm.v1.engine.placements import (
    PlacementChange,
    PlacementGate,
    asked_for,
    busy,
    placement_to_admit,
)
from vllm.v1.engine.sleep import check_mode, check_sleep, check_tags
from vllm.v1.metrics.merge import snapshot
from vllm.v1.metrics.prometheus import REGISTRY, metrics_text
from vllm.v1.metrics.reader import Metric
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from prometheus_client import Metric as PrometheusMetric
    from transformers import PreTrainedTokenizerBase

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.batch_defaults import UsageContext
    from vllm.model_executor.placements import Placement
    from vllm.v1.engine.input_processor import ProcessedInput
    from vllm.v1.engine.output_processor import ProcessedOutputs
    from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

#: outputs handled before other tasks of the event loop get a turn, and logprobs that take as long
#: as one output if their tokens' texts are new
_CHUNK = 128
_LOGPROBS_PER_OUTPUT = 2
#: messages of the core whose tokens go out together when they come faster than they are handled
_MOST_TOGETHER = 8
#: pause between looks at whether all requests have ended
_TICK_S = 0.02


#: entries of a list that are gone through without a thread, in well under a millisecond
_SHORT_LIST = 2048


def _turns(outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
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


def _takes_long(prompt: PromptType, params: SamplingParams) -> bool:
    """Whether to process a request off the event loop; a malformed one fails at once."""
    if not isinstance(params, SamplingParams):
        return False
    if params.structured_outputs or params.bad_words or params.extra_args:
        return True
    lists = (params.allowed_token_ids, params.logit_bias, params.stop_token_ids)
    if any(len(entries or ()) > _SHORT_LIST for entries in lists):
        return True
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    return not isinstance(ids, list) or len(ids) > _SHORT_LIST


class AsyncLLM:
    """Serves many callers of one event loop; the core runs in its own process.

    `meanwhile`: called once while the core starts. `client`: to a core that another process has
    started and shares out.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        meanwhile: Callable[[], None] | None = None,
        client: AttachedClient | None = None,
    ) -> None:
        self.engine_core: AsyncMPClient | AttachedClient
        self.engine_core = client or AsyncMPClient(vllm_config, executor_class, log_stats)
        try:
            # While the core starts.
            with startup_phases.startup_phase("import front end"):
                from vllm.v1.engine.front_end import FrontEnd
            self._front_end = FrontEnd(vllm_config, log_stats)
            if meanwhile is not None:
                meanwhile()
            self.engine_core.wait_ready()
        except BaseException:
            self.engine_core.shutdown(timeout=0)
            raise
        self.vllm_config = vllm_config
        self.model_config = self._front_end.model_config
        self.tokenizer = self._front_end.tokenizer
        self.log_stats = log_stats
        self.input_processor = self._front_end.input_processor
        self.output_processor = self._front_end.output_processor
        self._streams: set[OutputStream] = set()
        self._wakes = Wakes()
        self._handler: asyncio.Task[None] | None = None
        #: held by the call that changes what sleeps
        self._sleep_lock = asyncio.Lock()
        self._placement_gate = PlacementGate()
        self._shares_core = client is not None
        self._error: BaseException | None = None
        self._loggers = self._front_end.make_stat_loggers(
            self.engine_core.configs, self.engine_core.router, alone=client is None
        )
        startup_phases.log_ledger()
        # One thread: a call with its own truncation changes the tokenizer for all others.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, disable_log_stats: bool = False) -> AsyncLLM:
        """`vllm_config` is resolved in place unless it is already."""
        from vllm.engine.resolve import resolve

        if not vllm_config.is_resolved:
            resolve(vllm_config)
        return cls(vllm_config, log_stats=not disable_log_stats)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> AsyncLLM:
        from vllm.engine.batch_defaults import UsageContext

        config = engine_args.create_engine_config(usage_context or UsageContext.API_SERVER)
        log_stats = not config.observability_config.disable_log_stats
        return cls(config, log_stats=log_stats, meanwhile=meanwhile)

    # ---- state ---------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._error is not None or self.engine_core.dead is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """The error of a dead engine."""
        if isinstance(self._error, EngineDeadError):
            return EngineDeadError(self._error.cause)
        if self._error is not None:
            return EngineDeadError(f"{type(self._error).__name__}: {self._error}")
        dead = self.engine_core.dead
        return EngineDeadError(dead.cause if dead is not None else None)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        if self.errored:
            raise self.dead_error

    # ---- requests ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        take_text: TakeText | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come. Leaving the loop early aborts the request.
        `data_parallel_rank`: the replica to run it; chosen here by default.

        `take_text`: called with what would be an output of nothing but new text, while the caller
        waits for the next output and has all before; what it takes is not yielded. An exception of
        it ends the loop.

        Raises `VLLMValidationError` before the engine sees a bad request, or later when what it
        asks for leaves nothing to sample; `EngineGenerateError` when this request failed,
        `EngineDeadError` when the engine is dead.
        """
        process = functools.partial(
            self.input_processor.process,
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            lora_request=lora_request,
            trace_headers=trace_headers,
            tokenization_kwargs=tokenization_kwargs,
            cache_salt=cache_salt,
            data_parallel_rank=data_parallel_rank,
        )
        try:
            processed = await self._process(prompt, sampling_params, process)
        except Exception as error:
            if self._loggers is not None and not isinstance(error, VLLMValidationError):
                self._loggers.record(None, IterationStats(failures=["input"]))
            raise
        placement = placement_to_admit(self.model_config, processed.request)
        if placement is not None:
            self._ensure_handler()
            admitted = await self.engine_core.call_utility("admit_placement", placement)
            processed.request.sampling_params.placement = admitted
        await self._placement_gate.passed()
        stream = self._start(processed, request_id, take_text)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            self._streams.discard(stream)
            if not finished:
                # After the failure of one of n completions, too: the others still run.
                self._abort_internal(stream.request_ids)

    async def _process(
        self, prompt: PromptType, params: SamplingParams, process: Callable[[], ProcessedInput]
    ) -> ProcessedInput:
        """Tokenise (prompts, bad words), check grammars and go through long lists off the event
        loop; a few token ids need no thread."""
        if not _takes_long(prompt, params):
            return process()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer_thread, process)

    def _start(
        self, processed: ProcessedInput, request_id: str, take_text: TakeText | None
    ) -> OutputStream:
        if self.errored:
            raise self.dead_error
        self._front_end.require_awake()
        self._ensure_handler()
        kind = processed.request.sampling_params.output_kind
        stream = OutputStream(kind, self._wakes, take_text)
        text_sink = None if take_text is None else stream.put_text
        children = self.output_processor.add_request(
            processed.request, request_id, processed.prompt_text, stream.put, text_sink
        )
        stream.request_ids = [child.request_id for child in children]
        try:
            self.engine_core.add_requests([processed.request])
        except BaseException:
            self.output_processor.drop_requests(stream.request_ids)
            raise
        self._streams.add(stream)
        return stream

    def unfinished_request_ids(self) -> list[str]:
        """The callers' ids of all unfinished requests."""
        return self.output_processor.external_ids()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the callers' ids; their streams end with finish reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        aborted, _ = self.output_processor.abort_requests(ids)
        if not self.errored:
            self.engine_core.abort_requests(aborted)

    def _abort_internal(self, request_ids: list[str]) -> None:
        """Nobody waits any more: forget the requests and tell the core."""
        aborted = self.output_processor.drop_requests(request_ids)
        if aborted and not self.errored:
            self.engine_core.abort_requests(aborted)

    # ---- outputs -------------------------------------------------------------------------------

    def _ensure_handler(self) -> None:
        if self._handler is None:
            self._handler = asyncio.get_running_loop().create_task(self._handle_outputs())

    async def _handle_outputs(self) -> None:
        try:
            while True:
                await self._handle_all(await self.engine_core.get_outputs())
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("handling the engine's outputs failed")
            self._error = error
            dead = self.dead_error
            for stream in self._streams:
                stream.fail(dead)

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
                        self._wakes.hold()
                    await self._handle(outputs)
            finally:
                self._wakes.release()

    async def _handle(self, outputs: EngineCoreOutputs) -> None:
        iteration = IterationStats() if self._loggers is not None else None
        plain, outputs.plain = outputs.plain, None
        # First tokens are among these.
        for part in _turns(outputs.outputs):
            # Before the first one, too: messages may be waiting in a row.
            await asyncio.sleep(0)
            outputs.outputs = part
            self._finish_with(self.output_processor.process_outputs(outputs, iteration))
        rows = []
        if plain is not None:
            rows = self.output_processor.plain_rows(plain, outputs.engine_index)
        for first in range(0, len(rows), _CHUNK):
            await asyncio.sleep(0)
            some = rows[first : first + _CHUNK]
            self._finish_with(
                self.output_processor.process_plain(some, outputs.timestamp, iteration)
            )
        if self._loggers is not None and iteration is not None:
            self._loggers.record(outputs.scheduler_stats, iteration, outputs.engine_index)

    def _finish_with(self, processed: ProcessedOutputs) -> None:
        self.engine_core.abort_requests(processed.aborts)
        self.engine_core.stop_requests(processed.stops)

    # ---- utilities -----------------------------------------------------------------------------

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, None with --skip-tokenizer-init."""
        return self.tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method; one result per worker, replica after replica."""
        if (placement := asked_for(method, args, kwargs)) is not None:
            return await self.change_placement(placement, "refuse")
        self._ensure_handler()
        results: list[Any] = await self.engine_core.call_utility(
            "collective_rpc", method, timeout, args, kwargs
        )
        return results

    async def change_placement(
        self, placement: Placement, mode: str = "wait"
    ) -> list[dict[int, str]]:
        """Use other mixers of a supernet: see `LLM.change_placement`.

        `mode`: "wait" lets running requests end with the present placement, "refuse" raises
        `VLLMValidationError` while there are any. New ones are held back and run with the new one.
        Where several processes share the core, none can hold back the others' requests:
        `VLLMValidationError`.
        """
        check_mode(mode, "wait", "refuse")
        if self._shares_core:
            raise VLLMValidationError(
                "several API processes serve this engine, so the placement cannot change; start "
                "it with --api-server-count 1, or with the placement",
                "placement",
            )
        async with self._placement_gate.closed():
            if self.engine_core.router is not None:
                # All replicas or none: not before none of them has a request.
                await self._requests_end(mode)
                mode = "wait"
            while (change := await asyncio.shield(self._change_placement(placement))).is_busy:
                if mode == "refuse":
                    raise busy()
                await self._requests_end(mode)
                await asyncio.sleep(_TICK_S)
        return change.placements

    async def _requests_end(self, mode: str) -> None:
        while self.output_processor.has_unfinished_requests():
            if mode == "refuse":
                raise busy()
            await asyncio.sleep(_TICK_S)

    async def _change_placement(self, placement: Placement) -> PlacementChange:
        self._ensure_handler()
        change: PlacementChange = await self.engine_core.call_utility("change_placement", placement)
        if not change.is_busy:
            self._front_end.show_placement(placement, change)
        return change

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self._ensure_handler()
        return bool(
            await self.engine_core.call_utility(
                "reset_prefix_cache", reset_running_requests, reset_connector
            )
        )

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release device memory until `wake_up`; see `LLM.sleep`.

        Running requests are aborted, or with `mode="wait"` finish first; new ones are refused at
        once with `EngineSleepingError`. Raises `VLLMValidationError` for another level or mode, and
        when `wake_up` is called while requests finish: then nothing sleeps.
        """
        check_sleep(self.vllm_config, level)
        check_mode(mode)
        with self._front_end.sleep.waiting() as check:
            await self._come_to_rest(mode, check)
            # Once the core is told, its answer counts, whether or not the caller waits for it.
            await asyncio.shield(self._fall_asleep(level, check))

    async def _come_to_rest(self, mode: str, check: Callable[[], None]) -> None:
        """Abort the unfinished requests, or wait for them."""
        if mode == "abort":
            await self.abort(self.unfinished_request_ids())
        while self.output_processor.has_unfinished_requests():
            await asyncio.sleep(_TICK_S)
            check()

    @contextlib.asynccontextmanager
    async def resting(self, mode: str) -> AsyncGenerator[None, None]:
        """One process's part of a sleep that another one commands: no request of this front end
        runs, and new ones are refused, while the block lasts. A wake-up calls it off."""
        with self._front_end.sleep.waiting() as check:
            await self._come_to_rest(mode, check)
            # The order comes by another way than the aborts: this answer comes after them.
            await self.engine_core.call_utility("check_health")
            yield

    def call_off_rest(self) -> None:
        """The core is to be woken up: do not wait any longer to sleep."""
        self._front_end.sleep.call_off()

    def note_sleep(self, level: int) -> None:
        """Another process has put the core to sleep."""
        self._front_end.sleep.fell_asleep()
        self._front_end.show_sleep(level)

    def note_wake_up(self, tags: Iterable[str]) -> None:
        """Another process has woken these up."""
        self._front_end.sleep.woke_up(tags)
        self._front_end.show_sleep(0)

    async def _fall_asleep(self, level: int, check: Callable[[], None]) -> None:
        async with self._sleep_lock:
            check()
            self._ensure_handler()
            with self._front_end.sleep.falling_asleep():
                await self.engine_core.call_utility("sleep", level)
            self._front_end.show_sleep(level)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back "weights", "kv_cache", or both (None). A sleep that still waits for requests
        to finish is called off."""
        chosen = check_tags(tags)
        self._front_end.sleep.call_off()
        await asyncio.shield(self._wake_up(chosen))

    async def _wake_up(self, tags: tuple[str, ...]) -> None:
        async with self._sleep_lock:
            self._ensure_handler()
            await self.engine_core.call_utility("wake_up", tags)
            self._front_end.sleep.woke_up(tags)
            self._front_end.show_sleep(0)

    async def is_sleeping(self) -> bool:
        return self._front_end.sleep.is_sleeping

    def get_metrics(self) -> list[Metric]:
        """A snapshot of this engine's metrics; `ValueError` when statistics are off."""
        return self._front_end.get_metrics()

    def metrics_snapshot(self) -> list[PrometheusMetric]:
        """This engine's metrics and those of its process, for `metrics.merge`."""
        return snapshot([REGISTRY, self._front_end.metrics])

    def metrics_text(self) -> bytes:
        """This engine's metrics and those of its process, as `/metrics` shows them."""
        return metrics_text(self._front_end.metrics)

    async def do_log_stats(self) -> None:
        """Log throughput now."""
        if self._loggers is not None:
            self._loggers.log()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine; pending streams fail. Safe to call twice."""
        self.engine_core.shutdown(timeout)
        self._tokenizer_thread.shutdown(wait=False)
        if self._error is None:
            self._error = EngineDeadError("it was shut down")
        for stream in self._streams:
            stream.fail(self.dead_error)
        if self._handler is not None and not self._handler.get_loop().is_closed():
            self._handler.get_loop().call_soon_threadsafe(self._handler.cancel)
