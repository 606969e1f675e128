# SPDX-License-Identifier: Apache-2.0
"""A `MultiConnector` of children that do what a test tells them."""

from __future__ import annotations

from typing import Any

from tests.distributed.kv_transfer.extraction_harness import cache_config, transfer_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

TOYS = "tests.distributed.kv_transfer.toy_connectors"
PROGRAMMED = "tests.distributed.kv_transfer.programmed_connector"


def child(name: str = "Programmed", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": TOYS if name == "PlainConnector" else PROGRAMMED,
        "kv_connector_extra_config": extra,
    }


def multi_config(*children: dict[str, Any]) -> VllmConfig:
    transfer = transfer_config("MultiConnector", role="kv_both", connectors=list(children))
    return VllmConfig(kv_transfer_config=transfer)


def make(*children: dict[str, Any], role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    config = multi_config(*children)
    made = KVConnectorFactory.create_connector(config, role, cache_config(16, None))
    assert isinstance(made, MultiConnector)
    return made
