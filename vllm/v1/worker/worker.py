# SPDX-License-Identifier: Apache-2.0
"""One device: its memory budget, its model runner, and what can be called on it remotely."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm import decisions
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.current import with_own_layers
from vllm.distributed.device_communicators.pushed_sums import LargestSum
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized, ensure_kv_transfer_shutdown
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ConnectorSlot,
    connector_device_bytes,
    use_slot,
)
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    share_memory,
)
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.layers.moe import check_expert_parallel, expert_counts, has_mixtures
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.class_registry import resolve_class
from vllm.utils.startup_phases import startup_phase
from vllm.utils.waiting import waiting_for
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.structured_output.masks import ReceiveMasks, no_masks
from vllm.v1.worker.expert_balancer import ExpertBalancer
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.sleep import Sleeper
from vllm.v1.worker.warm_up import find_kernels, profile_peak_bytes, warm_up
from vllm.v1.worker.worker_placements import WorkerPlacements

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.kernels.triton.compile_ahead import ParallelCompilation
    from vllm.kernels.triton.kernel_plan import KernelPlan

logger = init_logger(__name__)


class Worker(WorkerPlacements):
    """Rank `rank` of the configuration's `world_size` workers, the `local_rank`-th of its host.

    `distributed_init_method`: where the ranks meet (a URL of torch.distributed; unused by one).
    Runs on the thread that owns the device.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int = 0,
        rank: int = 0,
        distributed_init_method: str = "",
        receive_masks: ReceiveMasks = no_masks,
    ) -> None:
        load_general_plugins()
        assert vllm_config.model_config is not None
        self.vllm_config = with_own_layers(vllm_config)
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config
        self.parallel_config.rank = rank
        self.rank = rank
        self.local_rank = local_rank
        self.distributed_init_method = distributed_init_method
        self._receive_masks = receive_masks
        self._connector_slot = ConnectorSlot()
        self.extension = self._make_extension()
        self.kernel_plan: KernelPlan | None = None
        self.compilation: ParallelCompilation | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Make this engine's configuration, decisions and connector current on this thread."""
        with set_current_vllm_config(self.vllm_config), use_slot(self._connector_slot):
            yield

    def _make_extension(self) -> Any:
        path = self.parallel_config.worker_extension_cls
        if not path:
            return None
        extension = resolve_class(path)()
        extension.worker = self
        return extension

    @startup_phase("init device")
    def init_device(self) -> None:
        self.device = torch.device(self.vllm_config.device_config.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
            # Captures need a stream of their own; everything runs there, so order is implied.
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
            self._log_compilations()
        with self.at_work():
            self._share_threads()
            with waiting_for("meeting", range(self.parallel_config.joint_world_size)):
                self._join_world()
            torch.manual_seed(self.model_config.seed)
            self.model_runner = ModelRunner(self.vllm_config, self.device, self._receive_masks)
            self.sleeper = Sleeper(self.model_runner)

    def _share_threads(self) -> None:
        """Workers on one CPU share its cores, unless OMP_NUM_THREADS says how many each uses."""
        replicas = len(self.parallel_config.local_ranks)
        size = self.parallel_config.local_world_size * replicas
        if self.device.type == "cpu" and size > 1 and "OMP_NUM_THREADS" not in os.environ:
            num_threads = max(1, torch.get_num_threads() // size)
            torch.set_num_threads(num_threads)
            decisions.record("threads per worker", num_threads, f"{size} workers share the CPU")

    def _join_world(self) -> None:
        """Make the process groups; waits for the other ranks."""
        parallel = self.parallel_config
        rank, init_method = self.rank, self.distributed_init_method
        if parallel.replicas_share_experts:
            rank += parallel.data_parallel_rank * parallel.world_size
            init_method = f"file://{parallel.meeting_directory}/store"
        if parallel.joint_world_size > 1:
            current_platform.prepare_collectives()
        init_distributed_environment(
            parallel.joint_world_size,
            rank,
            init_method,
            self.local_rank,
            current_platform.dist_backend,
            parallel.distributed_timeout_seconds,
            has_collectives=parallel.pipeline_parallel_size == 1,
        )
        initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        get_world_group().barrier()
        for group in (get_tp_group(), get_dp_group()):
            if group != get_world_group():
                group.barrier()
        if not parallel.disable_custom_all_reduce:
            share_memory(parallel.distributed_timeout_seconds, self._largest_sum())

    def _largest_sum(self) -> LargestSum:
        """Of the products that a step adds up over ranks."""
        rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        model = self.model_config
        return LargestSum(rows, model.get_hidden_size(), model.dtype.itemsize)

    def load_model(self) -> None:
        """Build the model, then read its weights while its kernels compile."""
        with self.at_work():
            with startup_phase("build model"):
                self.model_runner.build_model()
            model, *beside = self.model_runner.models
            is_stage = self.parallel_config.pipeline_parallel_size > 1
            check_expert_parallel(model, beside, self.parallel_config, is_stage)
            self.expert_balancer = ExpertBalancer(self.model_runner.models, get_ep_group())
            self.compilation = self._compile_ahead()
            if self.vllm_config.quant_config is not None:
                # Quantising weights launches kernels, which must not be half loaded by a thread.
                self.await_kernels()
            with startup_phase("load weights"):
                self.model_runner.load_weights()

    @staticmethod
    def _log_compilations() -> None:
        from vllm.kernels.triton import compile_log

        compile_log.install()

    def _compile_ahead(self) -> ParallelCompilation | None:
        if self.device.type != "cuda":
            return None
        from vllm.kernels.triton.compile_ahead import ParallelCompilation
        from vllm.kernels.triton.kernel_plan import KernelPlan

        with startup_phase("find kernels"):
            self.kernel_plan = KernelPlan.of(self.vllm_config, self.device)
            variants = find_kernels(self.model_runner, self.kernel_plan)
            return ParallelCompilation(variants, self.device)

    def await_kernels(self) -> None:
        """Until all that `load_model` has begun to compile is ready to be launched."""
        if self.compilation is not None:
            with startup_phase("wait for compiler"):
                self.compilation.wait()
            self.compilation = None

    def get_model(self) -> nn.Module:
        return self.model_runner.model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    @startup_phase("memory profile")
    def determine_available_memory(self) -> int:
        """Bytes for the arena: as given, or what weights and activations leave."""
        if (given := self.given_arena_bytes) is not None:
            return given
        self.await_kernels()
        with self.at_work():
            return self._profiled_memory()

    def _profiled_memory(self) -> int:
        cache, peak = self.cache_config, profile_peak_bytes(self.model_runner)
        total = current_platform.total_memory_bytes(self.device.index or 0)
        staging = connector_device_bytes(self.vllm_config)
        available = int(total * cache.gpu_memory_utilization) - peak - staging
        decisions.record(
            "state memory",
            f"{available / 2**30:.2f} GiB",
            f"{cache.gpu_memory_utilization:.2f} of {total / 2**30:.1f} GiB, less "
            f"{peak / 2**30:.2f} GiB for weights, activations and the driver"
            + (f" and {staging / 2**30:.2f} GiB of the KV connector" if staging else ""),
        )
        return available

    @startup_phase("arena")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with self.at_work():
            self.model_runner.initialize_kv_cache(kv_cache_config)
            ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
            if (connector := self._connector_slot.connector) is not None:
                connector.register_memory(self.model_runner.state_memory())

    def get_kv_connector_handshake_metadata(
        self,
    ) -> tuple[tuple[int, int], KVConnectorHandshakeMetadata | None]:
        """(Pipeline rank, tensor-parallel rank) and what the connector tells its peers."""
        connector = self._connector_slot.connector
        metadata = None if connector is None else connector.get_handshake_metadata()
        ranks = get_pp_group().rank_in_group, get_tensor_model_parallel_rank()
        return ranks, metadata

    def weights_read(self) -> tuple[int, tuple[int, ...]]:
        """Bytes of weights that a step reads here: of the model, and by its number of drafts per
        request of the drafter."""
        read = self.model_runner.weights_read()
        return read.target, read.drafter

    @startup_phase("warm-up")
    def warm_up(self) -> None:
        if self.device.type != "cuda":
            return
        self.await_kernels()
        with self.at_work():
            # What loading left behind is not there while memory for graphs is taken.
            gc.collect()
            warm_up(self.model_runner)
        self._report_unforeseen_kernels()

    def _report_unforeseen_kernels(self) -> None:
        from vllm.kernels.triton import compile_log

        unforeseen = [one.kernel for one in compile_log.compilations() if not one.ahead]
        if unforeseen:
            if self.kernel_plan is not None:
                self.kernel_plan.discard()
            logger.warning("kernels that were not compiled ahead: %s", ", ".join(unforeseen))

    def has_experts(self) -> bool:
        """Whether this stage has some."""
        return has_mixtures(self.model_runner.model)

    def expert_counts(self) -> dict[str, list[int]]:
        """See `layers.moe.expert_counts`."""
        return expert_counts(self.model_runner.model)

    def begin_expert_window(self) -> None:
        """See `ExpertBalancer.begin_window`."""
        self.expert_balancer.begin_window()

    def rearrange_experts(self) -> dict[str, list[float]]:
        """See `ExpertBalancer`; the layers' balancedness before and after."""
        self.expert_balancer.rearrange()
        return self.expert_balancer.balancedness

    def expert_balancedness(self) -> dict[str, list[float]]:
        """See `ExpertBalancer.balancedness`."""
        return self.expert_balancer.balancedness

    def num_pending_graphs(self) -> int:
        """Sizes that start-up left to be captured."""
        return sum(one.graphs.num_pending for one in self.model_runner.placed.values())

    def capture_next_graph(self) -> int:
        """Capture one of them; returns how many are left."""
        with self.at_work():
            runner = self.model_runner
            for index, placed in runner.placed.items():
                if placed.graphs.num_pending:
                    runner.use_placement(index)
                    placed.graphs.capture_next()
                    break
        return self.num_pending_graphs()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        with self.at_work():
            return self.model_runner.execute_model(scheduler_output)

    def call(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A worker or extension method by name, or any callable given the worker first.

        Raises `VLLMValidationError` for a name that is none.
        """
        with self.at_work():
            if callable(method):
                return method(self, *args, **kwargs)
            for owner in (self, self.extension):
                if owner is not None and method in dir(owner) and not method.startswith("_"):
                    return getattr(owner, method)(*args, **kwargs)
        raise VLLMValidationError(f"the worker has no method {method!r}", "method", method)

    def apply_model(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.get_model())

    def sleep(self, level: int) -> int:
        """Release device memory until `wake_up`; returns the bytes released."""
        return self.sleeper.sleep(level)

    def wake_up(self, tags: Collection[str]) -> None:
        with self.at_work():
            self.sleeper.wake_up(tags)

    def reload_weights(self) -> None:
        """Read the checkpoint again into the same parameters."""
        with self.at_work():
            self.model_runner.reload_weights()

    def shutdown(self) -> None:
        """Drain the connector, free the device memory and leave the world."""
        with self.at_work():
            ensure_kv_transfer_shutdown()
        self.model_runner.close()
        # Communicators do not end before the graphs that use them.
        gc.collect()
        if self.parallel_config.joint_world_size > 1:
            destroy_distributed_environment()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
