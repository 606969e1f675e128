# SPDX-License-Identifier: Apache-2.0
"""Worker-side order of calls, layer hooks, and the merging of several workers' reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.toy_connectors import PlainConnector, plain
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator, yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_transfer_state import (
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


class Recorder(PlainConnector):
    """Writes down what is called, and whether metadata was bound."""

    def __init__(self) -> None:
        super().__init__(VllmConfig(kv_transfer_config=plain()), KVConnectorRole.WORKER, None)
        self.calls: list[str] = []

    def log(self, name: str) -> None:
        self.calls.append(name + ("" if self.has_connector_metadata() else " (unbound)"))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.log("handle_preemptions")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(forward_context, ForwardContext)
        self.log("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.log(f"wait_for_layer_load {layer_name}")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        self.log(f"save_kv_layer {layer_name}")

    def wait_for_save(self) -> None:
        self.log("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        self.log(f"get_finished {sorted(finished_req_ids)}")
        return {"sent"}, {"received"}

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.log("errors")
        return {3}

    def get_kv_connector_stats(self) -> Any:
        self.log("stats")
        return None

    def take_failed_requests(self) -> dict[str, str]:
        return {"r": "because"}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    kv_transfer_state.current_slot().connector = recorder
    yield recorder
    kv_transfer_state.current_slot().connector = None


def step_output() -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"b", "a"}
    output.kv_connector_metadata = KVConnectorMetadata()
    return output


def layer(name: str) -> None:
    maybe_wait_for_layer_load(name)
    maybe_save_kv_layer(name, torch.zeros(1), AttentionMetadata())


CONTEXT = ForwardContext({}, {})


def test_order_of_a_step(recorder: Recorder) -> None:
    mixin = KVConnectorModelRunnerMixin
    mixin.before_blocks_change(step_output())
    assert recorder.calls == ["handle_preemptions (unbound)"]
    recorder.calls.clear()
    with mixin.maybe_get_kv_connector_output(step_output(), CONTEXT) as report:
        layer("target")
        layer("drafter")
    assert recorder.calls == [
        "start_load_kv",
        "wait_for_layer_load target",
        "save_kv_layer target",
        "wait_for_layer_load drafter",
        "save_kv_layer drafter",
        "wait_for_save",
        "get_finished ['a', 'b']",
        "errors",
        "stats",
    ]
    assert not recorder.has_connector_metadata()
    assert report == KVConnectorOutput({"sent"}, {"received"}, invalid_block_ids={3})
    assert mixin.take_failed_requests() == {"r": "because"}


def test_step_without_tokens(recorder: Recorder) -> None:
    report = KVConnectorModelRunnerMixin.kv_connector_no_forward(step_output())
    assert report is not None and report.finished_sending == {"sent"}
    assert recorder.calls == [
        "start_load_kv",
        "get_finished ['a', 'b']",
        "errors",
        "stats",
    ]


def test_step_that_only_waits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits before it asks what has ended."""
    output = step_output()
    output.pause_s = 0.5
    monkeypatch.setattr(recorder, "wait_for_transfers", lambda s: recorder.log(f"waits {s}"))
    KVConnectorModelRunnerMixin.kv_connector_no_forward(output)
    assert recorder.calls[:3] == ["start_load_kv", "waits 0.5", "get_finished ['a', 'b']"]


def test_connectors_wait_by_sleeping(recorder: Recorder) -> None:
    began = time.perf_counter()
    recorder.wait_for_transfers(0.02)
    assert time.perf_counter() - began >= 0.02


def test_failed_forward_unbinds(recorder: Recorder) -> None:
    mixin = KVConnectorModelRunnerMixin
    with pytest.raises(ZeroDivisionError):
        with mixin.maybe_get_kv_connector_output(step_output(), CONTEXT):
            raise ZeroDivisionError
    assert not recorder.has_connector_metadata()
    assert recorder.calls[-1] == "start_load_kv"


def test_step_without_metadata_is_an_error(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="no connector metadata"):
        KVConnectorModelRunnerMixin.kv_connector_no_forward(SchedulerOutput.make_empty())


def test_layers_outside_a_step(recorder: Recorder) -> None:
    """Warm-up and capture runs have no metadata."""
    layer("target")
    assert recorder.calls == []


def test_without_a_connector() -> None:
    mixin = KVConnectorModelRunnerMixin
    layer("target")
    with mixin.maybe_get_kv_connector_output(SchedulerOutput.make_empty(), CONTEXT) as report:
        pass
    assert report is None
    assert mixin.kv_connector_no_forward(SchedulerOutput.make_empty()) is None
    assert mixin.take_failed_requests() == {}


# ---- several workers ---------------------------------------------------------------------------


class Numbers:
    """Statistics that merge by `aggregate`."""

    def __init__(self, value: int) -> None:
        self.value = value

    def aggregate(self, other: Numbers) -> Numbers:
        return Numbers(self.value + other.value)


def worker_output(sending: set[str] | None = None, **kw: Any) -> ModelRunnerOutput:
    failed = kw.pop("failed", {})
    report = KVConnectorOutput(finished_sending=sending, **kw)
    return ModelRunnerOutput([], [], kv_connector_output=report, failed_req_ids=failed)


def merge(aggregator: KVOutputAggregator, *outputs: ModelRunnerOutput | None) -> KVConnectorOutput:
    merged = aggregator.aggregate(outputs)
    assert merged is not None and merged.kv_connector_output is not None
    return merged.kv_connector_output


def test_finished_when_every_worker_said_so() -> None:
    aggregator = KVOutputAggregator(2)
    report = merge(aggregator, worker_output({"a"}), worker_output(finished_recving={"x"}))
    assert report.finished_sending is None and report.finished_recving is None
    report = merge(aggregator, worker_output(), worker_output({"a", "b"}))
    assert report.finished_sending == {"a"}
    report = merge(aggregator, worker_output({"b"}, finished_recving={"x"}), worker_output())
    assert report.finished_sending == {"b"} and report.finished_recving == {"x"}
    # The same id may come back later (a new transfer) and starts to count again.
    assert merge(aggregator, worker_output({"a"}), worker_output()).finished_sending is None


def test_number_of_reports_is_the_connectors() -> None:
    recorder = Recorder()
    assert (
        merge(
            KVOutputAggregator.from_connector(recorder, 2), worker_output({"a"}), worker_output()
        ).finished_sending
        is None
    )
    recorder.get_finished_count = lambda: 1  # type: ignore[method-assign]
    aggregator = KVOutputAggregator.from_connector(recorder, 2)
    assert merge(aggregator, worker_output({"a"}), worker_output()).finished_sending == {"a"}
    with pytest.raises(ValueError):
        KVOutputAggregator(0)


def test_expected_count_may_change_while_running() -> None:
    aggregator = KVOutputAggregator(2)
    report = merge(aggregator, worker_output({"a"}, expected_finished_count=1), worker_output())
    assert report.finished_sending == {"a"} and report.expected_finished_count == 1


def test_everything_else_is_joined() -> None:
    report = merge(
        KVOutputAggregator(2),
        worker_output(
            invalid_block_ids={1}, invalid_blocks={(0, 1)}, kv_connector_stats=Numbers(1)
        ),
        worker_output(
            invalid_block_ids={2},
            kv_connector_stats=Numbers(2),
            kv_cache_events=Numbers(5),
            kv_connector_worker_meta=Numbers(7),
        ),
    )
    assert report.invalid_block_ids == {1, 2} and report.invalid_blocks == {(0, 1)}
    assert report.kv_connector_stats.value == 3  # type: ignore[union-attr]
    assert report.kv_cache_events.value == 5  # type: ignore[union-attr]
    assert report.kv_connector_worker_meta.value == 7  # type: ignore[union-attr]


def test_failures_of_any_worker_and_tokens_of_one() -> None:
    first = worker_output(failed={"a": "first"})
    second = ModelRunnerOutput(["r"], [[1]], failed_req_ids={"a": "second", "b": "second"})
    merged = KVOutputAggregator(2).aggregate([first, second], output_rank=1)
    assert merged is not None and merged.sampled_token_ids == [[1]]
    assert set(merged.failed_req_ids) == {"a", "b"}
    assert first.failed_req_ids == {"a": "first"}
    assert KVOutputAggregator(2).aggregate([None, second]) is None


def test_yield_req_data() -> None:
    new = NewRequestData("n", [1], [], None, None, ([1], [2]), 0)
    cached = CachedRequestData(
        req_ids=["c", "r"], resumed_req_ids={"r"}, new_block_ids=[None, ([3], [4])]
    )
    output = SchedulerOutput([new], cached, {}, 0)
    assert list(yield_req_data(output)) == [
        ("n", ([1], [2]), False),
        ("c", None, False),
        ("r", ([3], [4]), True),
    ]
