# SPDX-License-Identifier: Apache-2.0
"""The synchronous engine under `LLM`: add requests, step, collect outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import startup_phases
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient, InprocClient, SyncMPClient
from vllm.v1.engine.parallel_sampling import child_requests
from vllm.v1.engine.placements import (
    PlacementChange,
    asked_for,
    busy,
    placement_to_admit,
)
from vllm.v1.engine.sleep import check_sleep, check_tags
from vllm.v1.metrics.reader import Metric
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.batch_defaults import UsageContext
    from vllm.model_executor.placements import Placement
    from vllm.v1.executor.abstract import Executor

#: pause between questions whether a replica is at rest
_TICK_S = 0.001


class LLMEngine:
    """Runs requests of one caller.

    The core runs in its own process unless `multiprocess` (default: the environment variable
    `VLLM_ENABLE_V1_MULTIPROCESSING`) is false.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        multiprocess: bool | None = None,
    ) -> None:
        if multiprocess is None:
            multiprocess = envs.VLLM_ENABLE_V1_MULTIPROCESSING
        client_class = SyncMPClient if multiprocess else InprocClient
        self.engine_core: EngineCoreClient = client_class(vllm_config, executor_class, log_stats)
        try:
            # While the core starts.
            with startup_phases.startup_phase("import front end"):
                from vllm.v1.engine.front_end import FrontEnd
            self._front_end = FrontEnd(vllm_config, log_stats)
            self.engine_core.wait_ready()
        except BaseException:
            self.engine_core.shutdown(timeout=0)
            raise
        self.vllm_config = vllm_config
        self.model_config = self._front_end.model_config
        self.tokenizer = self._front_end.tokenizer
        self.input_processor = self.processor = self._front_end.input_processor
        self.output_processor = self._front_end.output_processor
        self._loggers = self._front_end.make_stat_loggers(
            self.engine_core.configs, self.engine_core.router
        )
        startup_phases.log_ledger()

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, disable_log_stats: bool = False
    ) -> LLMEngine:
        """`vllm_config` is resolved in place unless it is already."""
        from vllm.engine.resolve import resolve

        if not vllm_config.is_resolved:
            resolve(vllm_config)
        return cls(vllm_config, log_stats=not disable_log_stats)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: UsageContext | None = None
    ) -> LLMEngine:
        from vllm.engine.batch_defaults import UsageContext

        config = engine_args.create_engine_config(usage_context or UsageContext.ENGINE_CONTEXT)
        return cls(config, log_stats=not config.observability_config.disable_log_stats)

    # ---- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Validate and start a request, at the replica `data_parallel_rank` or one chosen here.

        Raises `VLLMValidationError` before the engine sees it, `EngineSleepingError` while it
        sleeps.
        """
        request = self.prepare_request(
            request_id,
            prompt,
            params,
            arrival_time,
            lora_request,
            tokenization_kwargs,
            trace_headers,
            priority,
            data_parallel_rank,
        )
        try:
            self.send_requests([request])
        except BaseException:
            self.output_processor.drop_requests(one.request_id for one in child_requests(request))
            raise

    def prepare_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> EngineCoreRequest:
        """As `add_request`, but leaves it to the caller to hand the result to `send_requests`;
        until then the request can be aborted."""
        self._front_end.require_awake()
        processed = self.input_processor.process(
            request_id,
            prompt,
            params,
            arrival_time,
            priority,
            lora_request=lora_request,
            trace_headers=trace_headers,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
        )
        placement = placement_to_admit(self.model_config, processed.request)
        if placement is not None:
            admitted = self.engine_core.call_utility("admit_placement", placement)
            processed.request.sampling_params.placement = admitted
        self.output_processor.add_request(processed.request, request_id, processed.prompt_text)
        return processed.request

    def send_requests(self, requests: list[EngineCoreRequest]) -> None:
        """Start prepared requests, all with the same step if they fit one."""
        self.engine_core.add_requests(requests)

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests; returns their last outputs. Unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        ended = IterationStats()
        aborted, outputs = self.output_processor.abort_requests(ids, ended)
        if self._loggers is not None:
            self._loggers.record_aborted(aborted, ended)
        self.engine_core.abort_requests(aborted)
        self._flush_if_idle()
        return outputs

    def abort_all(self) -> list[RequestOutput]:
        return self.abort_request(self.output_processor.external_ids())

    def step(self) -> list[RequestOutput]:
        """Wait for the core's next message and turn it into outputs (maybe none)."""
        outputs = self.engine_core.get_output()
        iteration = IterationStats() if self._loggers is not None else None
        processed = self.output_processor.process_outputs(outputs, iteration)
        self.engine_core.abort_requests(processed.aborts)
        self.engine_core.stop_requests(processed.stops)
        self._record(outputs, iteration)
        self._flush_if_idle()
        return processed.request_outputs

    def _flush_if_idle(self) -> None:
        """Of requests that have ended a connector may still store something, in the core's steps:
        nobody takes these when the last one has ended."""
        if not self.has_unfinished_requests():
            for later in self.engine_core.flush():
                self._record(later, IterationStats())

    def _record(self, outputs: EngineCoreOutputs, iteration: IterationStats | None) -> None:
        if self._loggers is not None and iteration is not None:
            self._loggers.record(outputs.scheduler_stats, iteration, outputs.engine_index)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.get_num_unfinished_requests()

    # ---- utilities -----------------------------------------------------------------------------

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._front_end.require_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """A snapshot of this engine's metrics; `ValueError` when statistics are off."""
        return self._front_end.get_metrics()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if (placement := asked_for(method, args, kwargs)) is not None:
            return self.change_placement(placement)
        results: list[Any] = self.engine_core.call_utility(
            "collective_rpc", method, timeout, args, kwargs
        )
        return results

    def change_placement(self, placement: Placement) -> list[dict[int, str]]:
        """See `LLM.change_placement`."""
        placement = self._front_end.placement_of(placement)
        several = self.engine_core.router is not None
        if several and self.has_unfinished_requests():
            raise busy()
        while True:
            change: PlacementChange = self.engine_core.call_utility("change_placement", placement)
            if not change.is_busy:
                break
            if not several:
                raise busy()
            time.sleep(_TICK_S)  # a replica has yet to take in the end of its last request
        self._front_end.show_placement(placement, change)
        return change.placements

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` on every worker."""
        return self.collective_rpc("apply_model", args=(func,))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        flags = (reset_running_requests, reset_connector)
        return bool(self.engine_core.call_utility("reset_prefix_cache", *flags))

    def sleep(self, level: int = 1) -> None:
        """Abort every request and release device memory; see `LLM.sleep`."""
        check_sleep(self.vllm_config, level)
        self.abort_all()
        with self._front_end.sleep.falling_asleep():
            self.engine_core.call_utility("sleep", level)
        self._front_end.note_sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        chosen = check_tags(tags)
        self.engine_core.call_utility("wake_up", chosen)
        self._front_end.note_wake_up(chosen)

    def is_sleeping(self) -> bool:
        return self._front_end.sleep.is_sleeping

    def do_log_stats(self) -> None:
        """Log throughput now."""
        if self._loggers is not None:
            self._loggers.log()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the core; safe to call twice."""
        self.engine_core.shutdown(timeout)
