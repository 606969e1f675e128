# SPDX-License-Identifier: Apache-2.0
"""`MultiConnector`: statistics, events and metrics, by child and added up."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.distributed.kv_transfer.several_children import PROGRAMMED, child, make, multi_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import SchedulerStats
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.outputs import KVConnectorOutput


def test_statistics_events_and_messages_per_child() -> None:
    worker = make(child(number=1), child(), child(number=3), role=KVConnectorRole.WORKER)
    stats = cast(KVConnectorStats, worker.get_kv_connector_stats())
    merged = pickle.loads(pickle.dumps(stats)).aggregate(worker.get_kv_connector_stats())
    assert merged.reduce() == {"0:Programmed number": 2, "2:Programmed number": 6}
    assert not merged.is_empty()
    merged.reset()
    assert merged.is_empty()
    assert make(child(), child()).get_kv_connector_stats() is None
    meta = cast(KVConnectorWorkerMetadata, worker.build_connector_worker_meta())
    joined = meta.aggregate(worker.build_connector_worker_meta())
    scheduler = make(child(), child(), child())
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=joined))
    got = [c.outputs[0].kv_connector_worker_meta for c in scheduler._children]
    assert [None if m is None else m.number for m in got] == [2, None, 6]
    events = worker.get_kv_connector_kv_cache_events()
    assert [None if e is None else e.number for e in events.aggregate(events).parts] == [2, None, 6]


def test_statistics_are_built_again_from_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory.register_connector("Programmed", PROGRAMMED, "Programmed")
    worker = make(child(number=1), child(), child(number=3), role=KVConnectorRole.WORKER)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(worker.get_kv_connector_stats().data))
    built = MultiConnector.build_kv_connector_stats(sent)
    assert built is not None
    assert built.reduce() == {"0:Programmed number": 1, "2:Programmed number": 3}
    empty = MultiConnector.build_kv_connector_stats()
    assert empty is not None and empty.is_empty()
    with pytest.raises(ValueError, match="unknown KV connector 'Nobody'"):
        MultiConnector.build_kv_connector_stats({"0:Nobody": {"data": {}}})


def test_metrics_of_every_child() -> None:
    """From the workers' statistics to the registry, through a message between processes."""
    children = [child(number=1, metric="one"), child(number=7), child(number=3, metric="three")]
    children.append(child(number=5, metric="three"))
    config = multi_config(*children)
    config.model_config = SimpleNamespace(max_model_len=16, served_names=["m"])
    registry = CollectorRegistry()
    metrics = EngineMetrics(config, registry, 0)
    data = make(*children, role=KVConnectorRole.WORKER).get_kv_connector_stats().data
    for _ in range(2):
        stats = msgspec.msgpack.decode(
            msgspec.msgpack.encode(SchedulerStats(connector=data)), type=SchedulerStats
        )
        metrics.record_scheduler(stats)
    labels = {"model_name": "m", "engine": "0"}
    counts = [registry.get_sample_value(f"vllm:{n}_total", labels) for n in ("one", "three")]
    assert counts == [2, 2 * (3 + 5)]
    plain = MultiConnector.build_prom_metrics(multi_config(child()), {}, [], {})
    assert plain is None


def test_gauges_of_two_host_tiers_add_up() -> None:
    config = multi_config(*[{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}] * 2)
    config.model_config = SimpleNamespace(max_model_len=16, served_names=["m"])
    registry = CollectorRegistry()
    metrics = EngineMetrics(config, registry, 0)
    steps: list[list[dict[str, float]]] = [
        [{"host_bytes": 100.0, "host_used_bytes": 10.0}, {"host_bytes": 200.0}],
        [{"host_used_bytes": 30.0}, {"host_used_bytes": 5.0}],
        [{"host_used_bytes": 20.0}, {}],
    ]
    for parts in steps:
        data = {f"{i}:OffloadingConnector": {"data": part} for i, part in enumerate(parts)}
        metrics.record_scheduler(SchedulerStats(connector=data))
    labels = {"model_name": "m", "engine": "0"}
    names = ("capacity", "used")
    found = [registry.get_sample_value(f"vllm:kv_offload_host_{n}_bytes", labels) for n in names]
    assert found == [300, 25]
