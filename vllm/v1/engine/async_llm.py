# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine under the server: one stream of outputs per request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import startup_phases
from vllm.v1.engine.async_client import AsyncClient, AsyncMPClient, AttachedClient
from vllm.v1.engine.async_rest import AsyncRest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.no_pooling import no_pooling
from vllm.v1.engine.output_handler import OutputHandler
from vllm.v1.engine.output_stream import OutputStream, TakeText
from vllm.v1.engine.placements import asked_for, placement_to_admit
from vllm.v1.engine.replicas import adopt_decisions
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
    from vllm.v1.executor.abstract import Executor

#: entries of a list that are gone through without a thread, in well under a millisecond
_SHORT_LIST = 2048


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

    encode = no_pooling("AsyncLLM.encode", "generate")

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        meanwhile: Callable[[], None] | None = None,
        client: AttachedClient | None = None,
    ) -> None:
        self.engine_core: AsyncClient = client or AsyncMPClient(
            vllm_config, executor_class, log_stats
        )
        try:
            # While the core starts.
            with startup_phases.startup_phase("import front end"):
                from vllm.v1.engine.front_end import FrontEnd
            self.front_end = FrontEnd(vllm_config, log_stats)
            if meanwhile is not None:
                meanwhile()
            self.engine_core.wait_ready()
        except BaseException:
            self.engine_core.shutdown(timeout=0)
            raise
        self.vllm_config = vllm_config
        self.model_config = self.front_end.model_config
        self.tokenizer = self.front_end.tokenizer
        self.log_stats = log_stats
        self.input_processor = self.front_end.input_processor
        self.output_processor = self.front_end.output_processor
        self._loggers = self.front_end.make_stat_loggers(
            self.engine_core.configs,
            self.engine_core.router,
            alone=not self.engine_core.shares_core,
        )
        self._handler = OutputHandler(self.engine_core, self.output_processor, self._loggers)
        self.rest = AsyncRest(self.engine_core, self.front_end, self._handler)
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
        return self._handler.dead_error is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """The error of a dead engine."""
        return self._handler.dead_error or EngineDeadError()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        if self.errored:
            raise self.dead_error

    async def learn_decisions(self) -> None:
        """Let the configuration have what the core has decided since its start; of a dead one what
        was known stays."""
        with contextlib.suppress(EngineDeadError):
            found = await self.engine_core.call_utility("decisions")
            adopt_decisions(self.vllm_config, found)

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
        await self.rest.placement_gate.passed()
        placement = placement_to_admit(self.model_config, processed.request)
        if placement is not None:
            admitted = await self.rest.admitted(placement)
            processed.request.sampling_params.placement = admitted
        stream = self._start(processed, request_id, take_text)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            self._handler.streams.discard(stream)
            if not finished:
                # After the failure of one of n completions, too: the others still run.
                self._handler.forget(stream)

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
        self.front_end.require_awake()
        self._handler.start()
        kind = processed.request.sampling_params.output_kind
        stream = OutputStream(kind, self._handler.wakes, take_text)
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
        self._handler.streams.add(stream)
        return stream

    def unfinished_request_ids(self) -> list[str]:
        """The callers' ids of all unfinished requests."""
        return self.output_processor.external_ids()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the callers' ids; their streams end with finish reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._handler.abort(ids)

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
        `VLLMValidationError`. With "overlap" new ones start at once, beside those that run; the new
        placement is one that a request could choose, and has its memory.
        """
        return await self.rest.change_placement(placement, mode)

    def one_placement(self) -> AbstractAsyncContextManager[str | None]:
        """For a text that several requests make, one after another: a change of the engine's
        placement waits for the end of the block, or raises as if a request ran. With "overlap" it
        does not wait: the placement that is yielded is what these requests have to ask for; None
        where requests cannot choose."""
        return self.rest.one_placement()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
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
        await self.rest.sleep(level, mode)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back "weights", "kv_cache", or both (None). A sleep that still waits for requests
        to finish is called off."""
        await self.rest.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return self.front_end.sleep.is_sleeping

    def get_metrics(self) -> list[Metric]:
        """A snapshot of this engine's metrics; `ValueError` when statistics are off."""
        return self.front_end.get_metrics()

    def metrics_snapshot(self) -> list[PrometheusMetric]:
        """This engine's metrics and those of its process, for `metrics.merge`."""
        return snapshot([REGISTRY, self.front_end.metrics])

    def metrics_text(self) -> bytes:
        """This engine's metrics and those of its process, as `/metrics` shows them."""
        return metrics_text(self.front_end.metrics)

    async def do_log_stats(self) -> None:
        """Log throughput now."""
        if self._loggers is not None:
            self._loggers.log()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine; pending streams fail. Safe to call twice."""
        self.engine_core.shutdown(timeout)
        self._tokenizer_thread.shutdown(wait=False)
        self._handler.stop()
