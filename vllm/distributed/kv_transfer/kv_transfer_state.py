# SPDX-License-Identifier: Apache-2.0
"""The worker-side connector of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: None without a connector; the layers' hooks test it on every call
connector: KVConnectorBase_V1 | None = None


def get_kv_transfer_group() -> KVConnectorBase_V1:
    """The worker's connector; raises when there is none."""
    if connector is None:
        raise RuntimeError("no KV connector: ensure_kv_transfer_initialized() has not made one")
    return connector


def has_kv_transfer_group() -> bool:
    return connector is not None


def is_v1_kv_transfer_group(group: KVConnectorBase_V1 | None = None) -> bool:
    """Whether `group` (default: the worker's connector) speaks the V1 interface."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return isinstance(connector if group is None else group, KVConnectorBase_V1)


def ensure_kv_transfer_initialized(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Make the worker-side connector once, if the configuration names one."""
    global connector
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance or connector is not None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    connector = KVConnectorFactory.create_connector(
        config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
    )


def ensure_kv_transfer_shutdown() -> None:
    """Shut the worker-side connector down; outstanding transfers are drained by it."""
    global connector
    current, connector = connector, None
    if current is not None:
        current.shutdown()
