# SPDX-License-Identifier: Apache-2.0
"""The worker-side connector of the engine at work.

A process may run several engines. Each worker keeps its connector in a `ConnectorSlot` and makes it
the current one while it is called; the functions here ask the current slot. Code that runs outside
a worker's calls finds a slot of its own, which is empty unless it fills it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class ConnectorSlot:
    """One engine's worker-side connector, None without; layers' hooks test it on every call.

    `acts_on_every_layer`: what its class says of its configuration.
    """

    connector: KVConnectorBase_V1 | None = None
    acts_on_every_layer: bool = True


_slot: ContextVar[ConnectorSlot] = ContextVar("kv_connector_slot")
_outside = ConnectorSlot()


def current_slot() -> ConnectorSlot:
    """The slot of the engine at work."""
    return _slot.get(_outside)


@contextmanager
def use_slot(slot: ConnectorSlot) -> Iterator[None]:
    """Make `slot` the current one for the duration of the block, on this thread."""
    token = _slot.set(slot)
    try:
        yield
    finally:
        _slot.reset(token)


def get_kv_transfer_group() -> KVConnectorBase_V1:
    """The connector of the engine at work; RuntimeError when there is none."""
    connector = current_slot().connector
    if connector is None:
        raise RuntimeError(
            "no KV connector: the engine at work has none, or no worker is being called"
        )
    return connector


def has_kv_transfer_group() -> bool:
    return current_slot().connector is not None


def connector_acts_on_every_layer() -> bool:
    """Whether layers that compute with their cache tell a connector."""
    slot = current_slot()
    return slot.connector is not None and slot.acts_on_every_layer


def is_v1_kv_transfer_group(group: KVConnectorBase_V1 | None = None) -> bool:
    """Whether `group` (default: the current connector) speaks the V1 interface."""
    return isinstance(current_slot().connector if group is None else group, KVConnectorBase_V1)


def ensure_kv_transfer_initialized(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Make the current slot's connector once, if the configuration names one."""
    slot = current_slot()
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance or slot.connector is not None:
        return
    connector_class = KVConnectorFactory.get_connector_class(transfer)
    slot.acts_on_every_layer = connector_class.acts_on_every_layer(
        transfer.kv_connector_extra_config
    )
    slot.connector = KVConnectorFactory.create_connector(
        config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
    )


def connector_device_bytes(vllm_config: VllmConfig) -> int:
    """Device memory that a worker's connector will allocate itself."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return 0
    connector_class = KVConnectorFactory.get_connector_class(transfer)
    return connector_class.device_bytes(transfer, vllm_config.device_config.device_type)


def ensure_kv_transfer_shutdown() -> None:
    """Shut the current slot's connector down; outstanding transfers are drained by it."""
    slot = current_slot()
    connector, slot.connector = slot.connector, None
    if connector is not None:
        connector.shutdown()


# ---- calls from the layers; one test when there is no connector ---------------------------------


def maybe_wait_for_layer_load(layer_name: str) -> None:
    """Before a layer reads its cache. Nothing is bound during warm-up and capture runs."""
    connector = current_slot().connector
    if connector is None or not connector.has_connector_metadata():
        return
    connector.wait_for_layer_load(layer_name)


def maybe_save_kv_layer(
    layer_name: str, kv_cache: Tensor, attn_metadata: AttentionMetadata
) -> None:
    """After a layer has written this step's rows to `kv_cache [num_blocks, ...]`."""
    connector = current_slot().connector
    if connector is None or not connector.has_connector_metadata():
        return
    connector.save_kv_layer(layer_name, kv_cache, attn_metadata)
