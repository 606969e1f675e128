# SPDX-License-Identifier: Apache-2.0
"""`MultiConnector`: who loads, who saves, when blocks are free, and each child gets its part."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.distributed.kv_transfer.extraction_harness import (
    Harness,
    cache_config,
    extraction_config,
    row_values,
    transfer_config,
)
from tests.distributed.kv_transfer.several_children import child, make, multi_config
from tests.distributed.kv_transfer.toy_connectors import HybridConnector
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.capabilities import ConnectorCapabilities
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_children import MultiConnectorClass
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass
class FakeBlocks:
    """What `KVCacheBlocks` offers connectors here."""

    ids: list[int]

    def new_empty(self) -> FakeBlocks:
        return FakeBlocks([])


def request(req_id: str = "r") -> Request:
    return Request(req_id, [1, 2, 3], None)


def test_memory_is_left_by_all_children_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config, vllm_config = cache_config(16, None), multi_config(child(), child("PlainConnector"))
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True  # as the plain one needs
    multi = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER, config)
    assert isinstance(multi, MultiConnector)
    assert not multi.can_leave_memory
    left: list[Any] = []
    for one in multi._children:
        with pytest.raises(RuntimeError, match="stays with its state memory"):
            one.leave_memory(config)
    for one in multi._children:
        assert not multi.can_leave_memory
        monkeypatch.setattr(type(one), "can_leave_memory", True)
        monkeypatch.setattr(type(one), "leave_memory", lambda self, config: left.append(self))
    assert multi.can_leave_memory
    multi.leave_memory(config)
    assert left == multi._children


def test_first_child_with_a_match_loads() -> None:
    multi = make(child(match=0), child(match=5), child(match=9))
    assert multi.get_num_new_matched_tokens(request(), 0) == (5, False)
    multi.update_state_after_alloc(request(), FakeBlocks([7]), 5)
    seen = [c.allocations for c in multi._children]
    assert seen == [[([], 0)], [([7], 5)], [([], 0)]]
    assert [c.asked for c in multi._children] == [1, 1, 1]


def test_nobody_matches() -> None:
    multi = make(child(match=0), child(match=0))
    assert multi.get_num_new_matched_tokens(request(), 0) == (0, False)
    multi.update_state_after_alloc(request(), FakeBlocks([7]), 0)
    assert [c.allocations for c in multi._children] == [[([], 0)], [([], 0)]]


def test_asynchronous_match_and_undecided_child() -> None:
    multi = make(child(match=4, runs_beside=True), child(match=9))
    assert multi.get_num_new_matched_tokens(request(), 0) == (4, True)
    multi = make(child(match=4), child(match=None))
    assert multi.get_num_new_matched_tokens(request(), 0) == (None, False)


def finish(multi: Any, method: str = "request_finished", of: Request | None = None) -> Any:
    argument: Any = [1] if method == "request_finished" else ([1],)
    return getattr(multi, method)(of or request(), argument)


@pytest.mark.parametrize("method", ["request_finished", "request_finished_all_groups"])
def test_blocks_wait_for_every_child_that_saves(method: str) -> None:
    multi = make(child(saves=True), child(saves=False), child(saves=True, params={"a": 1}))
    assert finish(multi, method) == (True, {"a": 1})
    worker = make(child(sends=["r"]), child(), child(sends=["r"]), role=KVConnectorRole.WORKER)
    meta = multi.build_connector_meta(SchedulerOutput.make_empty())
    assert meta.extra_async_saves == {"r": 1}
    worker._children[2].sends = []
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
    assert worker.get_finished({"r"}) == (None, None)
    worker.clear_connector_metadata()
    worker._children[0].sends, worker._children[2].sends = [], ["r"]
    worker.bind_connector_metadata(multi.build_connector_meta(SchedulerOutput.make_empty()))
    assert worker.get_finished(set()) == ({"r"}, None)


def test_one_saver_and_none() -> None:
    multi = make(child(saves=True), child())
    assert finish(multi) == (True, None)
    assert multi.build_connector_meta(SchedulerOutput.make_empty()).extra_async_saves == {}
    assert finish(make(child(), child(params={"a": 1}))) == (False, {"a": 1})


@pytest.mark.parametrize(
    "first, reason", [({"params": {"a": 1}}, "more than one"), ({"loses": True}, "lost")]
)
def test_a_child_that_fails_at_the_end(first: dict[str, Any], reason: str) -> None:
    """The others are told of the end, and blocks that one of them reads stay."""
    multi = make(child(saves=True), child(**first), child(saves=True, params={"b": 1}))
    ended = request()
    assert finish(multi, of=ended) == (True, None)
    assert ended.status is RequestStatus.FINISHED_ERROR and reason in str(ended.error)
    meta = multi.build_connector_meta(SchedulerOutput.make_empty())
    assert meta.extra_async_saves == {"r": 1}
    aborted = request()
    aborted.status = RequestStatus.FINISHED_ABORTED
    assert finish(multi, of=aborted) == (True, None)
    assert aborted.status is RequestStatus.FINISHED_ABORTED


def test_each_child_gets_its_own_metadata() -> None:
    scheduler = make(child(tag="x"), child(tag="y"))
    worker = make(child(), child(), role=KVConnectorRole.WORKER)
    meta = scheduler.build_connector_meta(SchedulerOutput.make_empty())
    worker.handle_preemptions(meta)
    worker.bind_connector_metadata(meta)
    bound = [c._get_connector_metadata() for c in worker._children]
    assert [m.tag for m in bound] == ["x", "y"]
    assert [c.preemption_tag for c in worker._children] == ["x", "y"]
    worker.clear_connector_metadata()
    assert not any(c.has_connector_metadata() for c in [worker, *worker._children])


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.register_kv_caches({}),
        lambda m: m.start_load_kv(None),
        lambda m: m.wait_for_layer_load("a"),
        lambda m: m.save_kv_layer("a", torch.zeros(1), None),
        lambda m: m.wait_for_save(),
        lambda m: m.on_new_request(request()),
        lambda m: m.bind_gpu_block_pool(None),
        lambda m: m.set_host_xfer_buffer_ops(None),
        lambda m: m.register_cross_layers_kv_cache(None, None),
    ],
)
def test_plain_calls_reach_every_child(call: Callable[[Any], None]) -> None:
    multi = make(child(), child())
    call(multi)
    assert [len(c.calls) for c in multi._children] == [1, 1]


def test_reports_are_joined() -> None:
    multi = make(child(bad=[1], fails={"a": "x"}), child(bad=[2], fails={"a": "y", "b": "z"}))
    assert multi.get_block_ids_with_load_errors() == {1, 2}
    assert multi.get_blocks_with_load_errors() == {(0, 1), (0, 2)}
    assert multi.take_failed_requests() == {"a": "x", "b": "z"}
    assert not multi.has_pending_push_work()
    assert make(child(), child(pushes=True)).has_pending_push_work()
    assert list(make(child(events=[1]), child(events=[2])).take_events()) == [1, 2]
    assert make(child(), child()).reset_cache() is None
    assert make(child(resets=True), child()).reset_cache() is True
    assert make(child(resets=True), child(resets=False)).reset_cache() is False


def test_handshake() -> None:
    worker = make(child(number=1), child(), role=KVConnectorRole.WORKER)
    metadata = cast(KVConnectorHandshakeMetadata, worker.get_handshake_metadata())
    scheduler = make(child(), child())
    scheduler.set_xfer_handshake_metadata({0: metadata})
    first, second = scheduler._children
    assert {rank: m.number for rank, m in first.handshakes.items()} == {0: 1}
    assert second.handshakes == {}
    assert make(child(), child()).get_handshake_metadata() is None


def test_handshake_by_pipeline_rank_reaches_every_child() -> None:
    worker = make(child(number=1), child(), role=KVConnectorRole.WORKER)
    told = cast(KVConnectorHandshakeMetadata, worker.get_handshake_metadata())
    scheduler = make(child(), child())
    scheduler.set_xfer_handshake_metadata_pp_aware({(1, 0): told})
    first, second = scheduler._children
    assert {ranks: m.number for ranks, m in first.handshakes_by_stage.items()} == {(1, 0): 1}
    assert {rank: m.number for rank, m in first.handshakes.items()} == {0: 1}
    assert second.handshakes_by_stage == {}


def test_groups_only_if_all_children_can() -> None:
    for children, expected in (
        ([child(), child()], True),
        ([child(), child("PlainConnector")], False),
    ):
        config = multi_config(*children)
        assert KVConnectorFactory.supports_hma_config(config.kv_transfer_config) is expected
        config.scheduler_config.disable_hybrid_kv_cache_manager = not expected
        multi = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, cache_config(16, None)
        )
        assert supports_hma(multi) is expected
        # A child that knows one group still works where there is only one.
        assert finish(multi, "request_finished_all_groups") == (False, None)
    with pytest.raises(ValueError, match="one state group"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())


@pytest.mark.parametrize("connectors", [None, [], "ExampleConnector"])
def test_children_are_required(connectors: object) -> None:
    transfer = transfer_config("MultiConnector", connectors=connectors)
    with pytest.raises(ValueError, match="connectors"):
        KVConnectorFactory.supports_hma_config(transfer)
    with pytest.raises(ValueError, match="connectors"):
        KVConnectorFactory.create_connector(
            VllmConfig(kv_transfer_config=transfer), KVConnectorRole.WORKER, cache_config(16, None)
        )


def test_common_demands() -> None:
    layout = MultiConnector.get_required_kvcache_layout
    assert layout(multi_config(child(), child())) is None
    assert layout(multi_config(child(), child(layout="NHD"), child(layout="NHD"))) == "NHD"
    with pytest.raises(ValueError, match="different cache layouts"):
        layout(multi_config(child(layout="HND"), child(layout="NHD")))
    for pieces, expected in (([False, False], False), ([False, True], True)):
        extra = {"connectors": [child(piecewise=p) for p in pieces]}
        assert MultiConnector.requires_piecewise_for_cudagraph(extra) is expected
    hidden = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    for children, expected in (([hidden], False), ([hidden, child()], True)):
        assert MultiConnector.reads_recurrent_state({"connectors": children}) is expected
        assert MultiConnector.acts_on_every_layer({"connectors": children}) is expected
    assert make(child(), child()).get_finished_count() is None
    assert make(child(count=2), child(count=2)).get_finished_count() == 2
    with pytest.raises(ValueError, match="different numbers"):
        make(child(count=2), child()).get_finished_count()
    assert make(child(), child()).prefer_cross_layer_blocks is False


def test_one_policy_for_all_loads() -> None:
    with pytest.raises(ValueError, match="Programmed in a MultiConnector: kv_load_failure_policy"):
        make(child() | {"kv_load_failure_policy": "recompute"})


def test_children_have_the_parents_engine_id_or_their_own() -> None:
    multi = make(child(), child() | {"engine_id": "mine"})
    ids = [c._kv_transfer_config.engine_id for c in multi._children]
    assert ids == [multi._kv_transfer_config.engine_id, "mine"]
    assert multi._vllm_config.kv_transfer_config.kv_connector == "MultiConnector"


def test_waiting_ends_with_the_first_child_that_has_something() -> None:
    """Also where that is a child of a child; the end is told once."""
    inner = child("MultiConnector", connectors=[child(), child()])
    del inner["kv_connector_module_path"]
    multi = make(child(), inner, role=KVConnectorRole.WORKER)
    _, nested = multi._children
    for ends in (multi._children[0], nested._children[1]):
        began = time.monotonic()
        multi.wait_for_transfers(0.02)
        assert time.monotonic() - began >= 0.02
        threading.Timer(0.02, ends.transfer_ended).start()
        multi.wait_for_transfers(120)
        assert time.monotonic() - began < 60
        multi.begin_reports()


#: what the base does for all children at once -> why that is right
ANSWERED_BY_THE_BASE = {
    "role": "children have the same",
    "takes_arena": "`register_memory` asks each child",
    "register_arena": "`register_memory` calls each child's",
    "has_connector_metadata": "what is bound to the children is bound to it",
    "transfer_ended": "the children's ends are its own: they share the event",
    "wait_for_transfers": "as above",
    "begin_reports": "as above",
}


def test_every_call_reaches_the_children() -> None:
    """A method that the base gains must be forwarded, or a reason be given here."""
    interface = vars(ConnectorCapabilities) | vars(KVConnectorBase_V1)
    public = {name for name in interface if not name.startswith("_")}
    calls = {n for n in public if not isinstance(interface[n], type | None)}
    own = vars(MultiConnector).keys() | vars(MultiConnectorClass).keys()
    assert calls - own == ANSWERED_BY_THE_BASE.keys()


def test_every_child_is_shut_down() -> None:
    multi = make(child(breaks=True), child())
    with pytest.raises(RuntimeError, match="broken"):
        multi.shutdown()
    assert multi._children[1].calls == ["shutdown"]


def test_hidden_states_beside_another_saver(tmp_path: Path) -> None:
    """Two children hold a request's blocks; the rows are read before either's report frees them."""
    own = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": tmp_path / "hs"},
    }
    other = child(saves=True, sends_finished=True)
    transfer = transfer_config("MultiConnector", connectors=[other, own])
    harness = Harness(extraction_config(transfer), cache_config(16, 3))
    path = harness.run_to_end("r", 20)
    assert torch.equal(load_hidden_states(path)["hidden_states"], row_values(0, 20))


def test_hybrid_children_get_all_groups() -> None:
    seen: list[Any] = []
    multi = make(child())
    hybrid = multi._children[0]
    assert isinstance(hybrid, HybridConnector)
    hybrid.request_finished_all_groups = lambda r, b: (seen.append(b), (False, None))[1]  # type: ignore[method-assign,func-returns-value]
    multi.request_finished_all_groups(request(), ([1], [2]))
    assert seen == [([1], [2])]


def test_metadata_is_connector_metadata() -> None:
    meta = make(child()).build_connector_meta(SchedulerOutput.make_empty())
    assert isinstance(meta, KVConnectorMetadata)


def test_states_are_read_if_any_child_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each child is asked with its own metadata."""
    multi = make(child(), child(), role=KVConnectorRole.WORKER)
    meta = make(child(), child()).build_connector_meta(SchedulerOutput.make_empty())
    assert multi.will_read_recurrent_state(meta) is True
    for asked, expected in ((None, False), (meta.metadata[1], True), (meta.metadata[0], True)):
        for connector, own in zip(multi._children, meta.metadata, strict=True):
            answer = partial(lambda own, asked, given: given is own is asked, own, asked)
            monkeypatch.setattr(connector, "will_read_recurrent_state", answer)
        assert multi.will_read_recurrent_state(meta) is expected
