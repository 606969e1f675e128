# SPDX-License-Identifier: Apache-2.0
"""A scheduler-side connector whose answers the test dictates; it records every call."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class FakeMetadata(KVConnectorMetadata):
    """Nothing to say."""


class _Scripted(KVConnectorBase_V1):
    """`matches`: request id -> list of answers to `get_num_new_matched_tokens`, the last one
    repeated. `finish`: the answer to `request_finished`."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(config, role, kv_cache_config)
        self.calls: list[tuple[Any, ...]] = []
        self.matches: dict[str, list[tuple[int | None, bool]]] = {}
        self.finish: dict[str, tuple[bool, dict[str, Any] | None]] = {}

    def on_new_request(self, request):
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append(("match", request.request_id, num_computed_tokens))
        answers = self.matches.get(request.request_id, [(0, False)])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        num_blocks = len(blocks.get_block_ids()[0])
        self.calls.append(("alloc", request.request_id, num_blocks, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        self.calls.append(("meta", scheduler_output.total_num_scheduled_tokens))
        return FakeMetadata()

    def update_connector_output(self, connector_output):
        self.calls.append(("output",))

    def _finished(self, request, block_ids):
        self.calls.append(("finished", request.request_id, request.status.name, block_ids))
        return self.finish.get(request.request_id, (False, None))

    def start_load_kv(self, forward_context, **kwargs):
        raise AssertionError("worker side")

    def wait_for_layer_load(self, layer_name):
        raise AssertionError("worker side")

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        raise AssertionError("worker side")

    def wait_for_save(self):
        raise AssertionError("worker side")


class OneGroupConnector(_Scripted):
    def request_finished(self, request, block_ids):
        return self._finished(request, block_ids)


class AllGroupsConnector(_Scripted, SupportsHMA):
    def request_finished_all_groups(self, request, block_ids):
        return self._finished(request, block_ids)
