# SPDX-License-Identifier: Apache-2.0
"""Calls from the layers to their engine's connector; one test when there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_transfer_state import current_slot

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.v1.attention.backend import AttentionMetadata


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
