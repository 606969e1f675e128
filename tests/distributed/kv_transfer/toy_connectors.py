# SPDX-License-Identifier: Apache-2.0
"""Out-of-tree connectors, loaded through `kv_connector_module_path`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.distributed.kv_transfer.extraction_harness import transfer_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput


class PlainConnector(KVConnectorBase_V1):
    """Only what is abstract, one state group."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class HybridConnector(PlainConnector, SupportsHMA):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None


class OldConnector(PlainConnector):
    def __init__(self, vllm_config: Any, role: Any) -> None:
        raise AssertionError("a constructor of the old shape must not be called")


class ConfigNamedConnector(PlainConnector):
    """Names its parameters as it likes."""

    def __init__(self, config: Any, side: Any, caches: Any = None) -> None:
        super().__init__(config, side, caches)


class AnyArgumentsConnector(PlainConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def plain(name: str = "PlainConnector") -> KVTransferConfig:
    config = transfer_config(name, role="kv_both")
    config.kv_connector_module_path = __name__
    return config


@dataclass
class StatesMetadata(KVConnectorMetadata):
    """Request id, block of the first group and tokens after the step; whether it is a step in
    which the states are read."""

    reads: bool
    states: list[tuple[str, int, int]]


class StateReader(HybridConnector):
    """Copies the recurrent states of all requests after each step, and says so in every `every`th
    step only. What the first recurrent layer had is in `seen`, by request and tokens."""

    seen: ClassVar[dict[tuple[str, int], tuple[bool, Any]]] = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._every = self._kv_transfer_config.get_from_extra_config("every", 1)
        self._steps = 0
        self._blocks: dict[str, int] = {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StatesMetadata:
        self._steps += 1
        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = new.block_ids[0][0]
            computed[new.req_id] = new.num_computed_tokens
        states = [(r, self._blocks[r], computed[r] + n) for r, n in counts.items()]
        return StatesMetadata(self._steps % self._every == 0, states)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._state = next(cache[1] for cache in kv_caches.values() if isinstance(cache, tuple))

    def will_read_recurrent_state(self, connector_metadata: KVConnectorMetadata) -> bool:
        assert isinstance(connector_metadata, StatesMetadata)
        return connector_metadata.reads

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StatesMetadata)
        for req_id, block, tokens in metadata.states:
            request = req_id.partition("-")[0]
            self.seen[request, tokens] = (metadata.reads, self._state[block].clone())
