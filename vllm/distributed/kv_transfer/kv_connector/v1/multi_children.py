# SPDX-License-Identifier: Apache-2.0
"""`MultiConnector`'s children, as its configuration says."""

import copy
from collections.abc import Iterator
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def child_configs(
    extra_config: dict[str, Any], engine_id: str | None = None
) -> list[KVTransferConfig]:
    """The children's configurations; ValueError when the list is missing or empty.

    A child without an `engine_id` of its own gets the given one.
    """
    given = extra_config.get("connectors")
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(
            "MultiConnector needs kv_connector_extra_config.connectors, a non-empty list of "
            "kv_transfer_config objects"
        )
    common = {} if engine_id is None else {"engine_id": engine_id}
    return [
        item if isinstance(item, KVTransferConfig) else KVTransferConfig(**{**common, **item})
        for item in given
    ]


def child_classes(
    extra_config: dict[str, Any], engine_id: str | None = None
) -> Iterator[tuple[type[KVConnectorBase_V1], KVTransferConfig]]:
    """Each child's class and configuration."""
    for config in child_configs(extra_config, engine_id):
        yield KVConnectorFactory.get_connector_class(config), config


def children_of(
    vllm_config: VllmConfig,
) -> Iterator[tuple[type[KVConnectorBase_V1], VllmConfig]]:
    """Each child's class and the engine's configuration as that child sees it."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    children = child_classes(transfer.kv_connector_extra_config, transfer.engine_id)
    for child_cls, config in children:
        child_config = copy.copy(vllm_config)
        child_config.kv_transfer_config = config
        yield child_cls, child_config


def child_extras(
    extra_config: dict[str, Any],
) -> Iterator[tuple[type[KVConnectorBase_V1], dict[str, Any]]]:
    """Each child's class and its own `kv_connector_extra_config`."""
    for child_cls, config in child_classes(extra_config):
        yield child_cls, config.kv_connector_extra_config
