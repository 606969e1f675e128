# SPDX-License-Identifier: Apache-2.0
"""Settings that connectors which write files share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


def storage_path(transfer: KVTransferConfig) -> str:
    """The files' directory, absolute."""
    return os.path.abspath(os.fspath(transfer.get_from_extra_config("shared_storage_path", "/tmp")))


def num_writer_threads(transfer: KVTransferConfig) -> int:
    """Files written at a time; ValueError below 1."""
    count = int(transfer.get_from_extra_config("num_writer_threads", 8))
    if count < 1:
        raise ValueError(f"num_writer_threads must be >= 1, got {count}")
    return count


def flag(transfer: KVTransferConfig, key: str, default: bool) -> bool:
    """ValueError for anything but true or false."""
    value = transfer.get_from_extra_config(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"kv_connector_extra_config {key!r} must be true or false: {value!r}")
    return value
