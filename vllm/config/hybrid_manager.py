# SPDX-License-Identifier: Apache-2.0
"""Whether layers keep their own cache geometry, given what the KV connector can handle."""

from __future__ import annotations

from collections.abc import Callable

from vllm import decisions
from vllm.config.kv_transfer import KVTransferConfig
from vllm.exceptions import VLLMValidationError


def _connector_supports_groups(transfer: KVTransferConfig) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return bool(KVConnectorFactory.supports_hma_config(transfer))


def resolve_hybrid_manager(
    disable: bool | None,
    transfer: KVTransferConfig | None,
    supports_groups: Callable[[KVTransferConfig], bool] = _connector_supports_groups,
) -> bool:
    """The resolved value of `--disable-hybrid-kv-cache-manager`.

    An explicit "keep it on" together with a connector that handles only one cache group raises
    `VLLMValidationError`; without an explicit wish the manager is then off, and recorded.
    """
    if disable is True:
        return True
    active = transfer is not None and transfer.is_kv_transfer_instance
    if not active or (transfer is not None and supports_groups(transfer)):
        return False
    assert transfer is not None
    reason = f"connector {transfer.kv_connector} handles a single cache group only"
    if disable is False:
        raise VLLMValidationError(
            f"--no-disable-hybrid-kv-cache-manager: {reason}; leave the flag out or use a "
            "connector that subclasses SupportsHMA",
            parameter="disable_hybrid_kv_cache_manager",
            value=False,
        )
    decisions.record("hybrid_kv_cache_manager", "off", reason, "on")
    return True
