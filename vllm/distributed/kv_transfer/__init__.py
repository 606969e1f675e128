# SPDX-License-Identifier: Apache-2.0
"""Moving state in and out of the engine through connectors."""

from vllm.distributed.kv_transfer.kv_transfer_state import (
    connector_acts_on_every_layer,
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    is_v1_kv_transfer_group,
)

__all__ = [
    "connector_acts_on_every_layer",
    "ensure_kv_transfer_initialized",
    "ensure_kv_transfer_shutdown",
    "get_kv_transfer_group",
    "has_kv_transfer_group",
    "is_v1_kv_transfer_group",
]
