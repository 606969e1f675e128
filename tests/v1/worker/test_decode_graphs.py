# SPDX-License-Identifier: Apache-2.0
"""Which batches replay which graph, and when there are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.paged import PagedAttentionBackend
from vllm.v1.worker.decode_graphs import DecodeGraphs, graphs_forbidden


class _HostPlanned(PagedAttentionBackend):
    name = "HOST_PLANNED"
    supports_full_graph = False


def _captured(sizes: list[int]) -> DecodeGraphs:
    graphs = DecodeGraphs(sizes, max_rows=64)
    graphs._captured = dict.fromkeys(sizes, SimpleNamespace())  # type: ignore[assignment]
    return graphs


@pytest.mark.parametrize(
    ("num_reqs", "size"), [(1, 1), (2, 2), (3, 8), (8, 8), (9, 16), (16, 16), (17, None)]
)
def test_the_next_captured_size(num_reqs: int, size: int | None) -> None:
    assert _captured([1, 2, 8, 16]).size_for(num_reqs) == size


def test_without_captures_everything_is_eager() -> None:
    assert DecodeGraphs([], 64).size_for(1) is None
    assert DecodeGraphs([1, 2], 64).size_for(1) is None


def test_sizes_beyond_the_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="--max-num-seqs is 16"):
        DecodeGraphs([8, 32], 16)


def _config(connector: str | None) -> Any:
    transfer = None
    if connector is not None:
        transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config={})
    return SimpleNamespace(kv_transfer_config=transfer)


def test_backends_that_plan_on_the_host_forbid_graphs() -> None:
    backends = [GDNAttentionBackend, PagedAttentionBackend]
    assert graphs_forbidden(_config(None), backends) is None
    reason = graphs_forbidden(_config(None), [*backends, _HostPlanned])
    assert reason is not None and "HOST_PLANNED" in reason


@pytest.mark.parametrize("per_layer", [False, True])
def test_connectors_that_act_on_layers_forbid_graphs(
    per_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = SimpleNamespace(requires_piecewise_for_cudagraph=lambda extra: per_layer)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda config: chosen)
    reason = graphs_forbidden(_config("Some"), [PagedAttentionBackend])
    assert (reason is not None) is per_layer
