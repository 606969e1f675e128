# SPDX-License-Identifier: Apache-2.0
"""`KVConnectorBase` is the older name of `KVConnectorBase_V1`."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

KVConnectorBase = KVConnectorBase_V1
KVConnectorBaseType = KVConnectorBase_V1

__all__ = ["KVConnectorBase", "KVConnectorBaseType"]
