# SPDX-License-Identifier: Apache-2.0
"""Where the workers live, seen from the engine core."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import HangError, VLLMValidationError
from vllm.utils.class_registry import resolve_class
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.device_checks import check_devices
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.model_executor.placements import Placement
    from vllm.v1.core.placed_arena import BesideArena, PlacementSpecs
    from vllm.v1.worker.worker import Worker

#: `--distributed-executor-backend` -> class, imported with its workers when it is chosen
_EXECUTORS = {
    "uni": "vllm.v1.executor.uniproc.UniProcExecutor",
    "mp": "vllm.v1.executor.multiproc.MultiprocExecutor",
    "ray": "vllm.v1.executor.ray_actors.RayExecutor",
}
#: see `Executor.step_timeout_s`
_STEP_TIMEOUT_S = 300.0
_STEP_TIMEOUT_OF_GPUS_S = 20.0

T = TypeVar("T")

#: takes the error that ended the workers
FailureCallback = Callable[[Exception], None]


class Executor(ABC):
    """Runs steps on one or more workers, in the order they were given."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._on_failure: FailureCallback | None = None

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The executor for this configuration; ValueError for one that is not supported."""
        parallel = vllm_config.parallel_config
        if parallel.node_rank > 0:
            raise VLLMValidationError(
                f"--node-rank {parallel.node_rank}: the API and the engine are on node 0; start "
                "`vllm serve MODEL --headless` here, with node 0's other flags",
                "node_rank",
                parallel.node_rank,
            )
        if parallel.executor_backend != "ray":  # which finds devices elsewhere
            check_devices(vllm_config)
        return resolve_class(_EXECUTORS[parallel.executor_backend])

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return self.vllm_config.steps_in_flight

    @property
    def step_timeout_s(self) -> float:
        """How long a step may take. GPUs need seconds at most, so that workers that hang are found
        soon; nobody knows how long a CPU may need."""
        if (asked := envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) is not None:
            return asked
        on_cpu = self.vllm_config.device_config.device_type == "cpu"
        alone = on_cpu or self.vllm_config.parallel_config.joint_world_size == 1
        return _STEP_TIMEOUT_S if alone else _STEP_TIMEOUT_OF_GPUS_S

    def overdue(self) -> Exception:
        """The oldest step has no result after `step_timeout_s`: give up. Returns what to raise."""
        return HangError(overdue_message(self.step_timeout_s))

    def check_experts(self) -> None:
        """`VLLMValidationError` where experts are to be spread and no pipeline stage has any."""
        parallel = self.vllm_config.parallel_config
        if parallel.enable_expert_parallel and parallel.pipeline_parallel_size > 1:
            parallel.check_experts(any(self.collective_rpc("has_experts")))

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Per worker: layer name -> what it keeps."""
        return self.collective_rpc("get_kv_cache_spec")

    def get_placed_specs(self, placement: Placement | None = None) -> list[list[PlacementSpecs]]:
        """Per worker, of a supernet whose requests may choose: the placements that have memory from
        the start, the engine's own (or `placement` instead) first, and what their layers keep; else
        nothing."""
        return self.collective_rpc("get_placed_specs", args=(placement,))

    def get_bytes_beside(self, placement: Placement | None = None) -> list[BesideArena]:
        """Per worker: what journals (`vllm.kernels.journal`) and mixers take beside the arena, of
        all placements that have memory from the start, with `placement` instead of the engine's own
        if given."""
        return self.collective_rpc("get_bytes_beside", args=(placement,))

    def determine_available_memory(self) -> list[int]:
        """Per worker: bytes the state arena may take."""
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the arena of every worker and warm up."""
        self.collective_rpc(_initialize, args=(kv_cache_configs,))

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue one step."""

    @abstractmethod
    def send_token_masks(self, masks: FilledMasks) -> None:
        """Give the oldest step that waits for masks its own, see
        `vllm.v1.structured_output.masks`. A step's result comes after its masks were sent."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or `method(worker, ...)`, on every worker. `TimeoutError`
        if it has not ended after `timeout` seconds."""

    @abstractmethod
    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        """Before the first step: the scheduler's connector, which knows how many workers report a
        transfer's end."""

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """`callback(error)` is called once, on any thread, when workers end by themselves."""
        self._on_failure = callback

    @abstractmethod
    def check_health(self) -> None:
        """Raise if a worker is gone."""

    @abstractmethod
    def shutdown(self, reason: str | None = None) -> None:
        """Stop the workers, giving up steps that wait for masks; safe to call twice. `reason`: what
        has failed, for those that cannot see it; None: a stop that was asked for."""


def _initialize(worker: Worker, kv_cache_configs: list[KVCacheConfig]) -> None:
    worker.initialize_from_config(kv_cache_configs[worker.rank])
    worker.warm_up()


def result_of_call(call: Future[T], method: object, timeout: float | None) -> T:
    """The result of `collective_rpc`'s `method`; `TimeoutError` says what goes on without it."""
    try:
        return call.result(timeout)
    except (TimeoutError, FutureTimeoutError):  # two classes before Python 3.11
        if call.done():  # just now, or with an error of its own
            return call.result()
        raise TimeoutError(
            f"the call of {method} has not ended after {timeout:g} s, its timeout; it goes on, and "
            "steps and calls after it wait for it"
        ) from None


def overdue_message(timeout_s: float) -> str:
    """What is wrong, and what to do where it is not."""
    return (
        f"a step has no result after {timeout_s:g} s; if steps may take that long, set "
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    )
