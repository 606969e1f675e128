# SPDX-License-Identifier: Apache-2.0
"""A connector that answers what its extra config says and writes down what it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.distributed.kv_transfer.toy_connectors import HybridConnector
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class TagMetadata(KVConnectorMetadata):
    tag: str


@dataclass
class NumberMessage(KVConnectorWorkerMetadata, KVConnectorHandshakeMetadata):
    number: int

    def aggregate(self, other: Any) -> NumberMessage:
        return NumberMessage(self.number + other.number)


@dataclass
class NumberStats(KVConnectorStats):
    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> NumberStats:
        return NumberStats({"number": self.data["number"] + other.data["number"]})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class NumberMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, types: Any, names: Any, values: Any) -> None:
        super().__init__(vllm_config, types, names, values)
        assert self._kv_transfer_config is not None
        tag = self._kv_transfer_config.kv_connector_extra_config["metric"]
        self._counter = self._counter_cls(name=f"vllm:{tag}", documentation="", labelnames=names)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self._counter.labels(*labels).inc(transfer_stats_data["number"])


class Programmed(HybridConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.program = self._kv_transfer_config.kv_connector_extra_config
        self.sends = self.program.get("sends", [])
        self.allocations: list[tuple[list[int], int]] = []
        self.asked = 0
        self.calls: list[str] = []
        self.outputs: list[Any] = []
        self.handshakes: dict[int, Any] = {}
        self.handshakes_by_stage: dict[tuple[int, int], Any] = {}
        self.preemption_tag: str | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        assert vllm_config.kv_transfer_config is not None
        return vllm_config.kv_transfer_config.kv_connector_extra_config.get("layout")

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> NumberStats:
        return NumberStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> NumberMetrics | None:
        if "metric" not in vllm_config.kv_transfer_config.kv_connector_extra_config:
            return None
        return NumberMetrics(vllm_config, *arguments)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.handshakes_by_stage = metadata
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("piecewise", False)

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.calls.append("register_kv_caches")

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        self.calls.append("register_cross_layers_kv_cache")

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.calls.append("set_host_xfer_buffer_ops")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.calls.append("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        self.calls.append("save_kv_layer")

    def wait_for_save(self) -> None:
        self.calls.append("wait_for_save")

    def on_new_request(self, request: Any) -> None:
        self.calls.append("on_new_request")

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.calls.append("bind_gpu_block_pool")

    def shutdown(self) -> None:
        if self.program.get("breaks"):
            raise RuntimeError("broken")
        self.calls.append("shutdown")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.asked += 1
        return self.program.get("match", 0), self.program.get("runs_beside", False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        self.allocations.append((blocks.ids, num_external))

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        if self.program.get("loses"):
            raise RuntimeError("lost")
        return self.program.get("saves", False), self.program.get("params")

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids[0])

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent = finished_req_ids if self.program.get("sends_finished") else set(self.sends)
        return sent or None, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TagMetadata:
        return TagMetadata(self.program.get("tag", ""))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.preemption_tag = kv_connector_metadata.tag

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        return {(0, block) for block in self.program.get("bad", [])}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self.program.get("bad", []))

    def take_failed_requests(self) -> dict[str, str]:
        return self.program.get("fails", {})

    def has_pending_push_work(self) -> bool:
        return self.program.get("pushes", False)

    def take_events(self) -> Any:
        return self.program.get("events", [])

    def reset_cache(self) -> bool | None:
        return self.program.get("resets")

    def get_finished_count(self) -> int | None:
        return self.program.get("count")

    def _message(self) -> NumberMessage | None:
        return NumberMessage(self.program["number"]) if "number" in self.program else None

    def get_kv_connector_stats(self) -> NumberStats | None:
        return NumberStats({"number": self.program["number"]}) if "number" in self.program else None

    def get_kv_connector_kv_cache_events(self) -> NumberMessage | None:
        return self._message()

    def build_connector_worker_meta(self) -> NumberMessage | None:
        return self._message()

    def get_handshake_metadata(self) -> NumberMessage | None:
        return self._message()

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.handshakes = metadata

    def update_connector_output(self, connector_output: Any) -> None:
        self.outputs.append(connector_output)
