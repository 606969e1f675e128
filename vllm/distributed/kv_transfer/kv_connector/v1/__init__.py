# SPDX-License-Identifier: Apache-2.0
"""The V1 connector interface and the connectors in the tree."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)

__all__ = ["KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA", "supports_hma"]
