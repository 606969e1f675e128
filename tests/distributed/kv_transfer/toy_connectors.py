# SPDX-License-Identifier: Apache-2.0
"""Out-of-tree connectors, loaded through `kv_connector_module_path`."""

from __future__ import annotations

from typing import Any

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
