# SPDX-License-Identifier: Apache-2.0
"""Where the workers live, seen from the engine core."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from vllm.config import VllmConfig
from vllm.utils.dotted import resolve_class
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput

#: `--distributed-executor-backend` -> class, imported with its workers when it is chosen
_EXECUTORS = {"uni": "vllm.v1.executor.uniproc.UniProcExecutor"}


class Executor(ABC):
    """Runs steps on one or more workers, in the order they were given."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The executor for this configuration; ValueError for one that is not supported."""
        backend = vllm_config.parallel_config.distributed_executor_backend or "uni"
        if backend not in _EXECUTORS:
            raise ValueError(
                f"--distributed-executor-backend {backend} is not supported yet; use one of "
                + ", ".join(_EXECUTORS)
            )
        return resolve_class(_EXECUTORS[backend])

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return 2 if self.vllm_config.scheduler_config.async_scheduling else 1

    @abstractmethod
    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Per worker: layer name -> what it keeps."""

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Per worker: bytes the state arena may take."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the arena of every worker and warm up."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue one step."""

    @abstractmethod
    def send_token_masks(self, words: np.ndarray) -> None:
        """Give the oldest step that waits for masks its own: `[rows, words]` int32, see
        `vllm.v1.structured_output.masks`. A step's result comes after its masks were sent."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or `method(worker, ...)`, on every worker."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise if a worker is gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers, giving up steps that wait for masks; safe to call twice."""
