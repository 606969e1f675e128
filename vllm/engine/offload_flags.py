# SPDX-License-Identifier: Apache-2.0
"""`--kv-offloading-size` and `--kv-offloading-backend` as the connector they stand for."""

from __future__ import annotations

from vllm import decisions
from vllm.config import CacheConfig, KVTransferConfig
from vllm.exceptions import VLLMValidationError

_CONNECTORS = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
_GIB = 2**30


def offload_connector(
    cache: CacheConfig, transfer: KVTransferConfig | None
) -> KVTransferConfig | None:
    """The engine's connector: `transfer`, or the one the offloading flags ask for.

    Raises `VLLMValidationError` when both name one.
    """
    size, backend = cache.kv_offloading_size, cache.kv_offloading_backend
    if size is None:
        return transfer
    name = _CONNECTORS[backend]
    if transfer is not None and transfer.kv_connector is not None:
        raise VLLMValidationError(
            f"--kv-offloading-size and --kv-transfer-config ({transfer.kv_connector}) both name a "
            f"connector; leave the flag out and list {name} with the other one as children of a "
            "MultiConnector",
            parameter="kv_offloading_size",
            value=size,
        )
    # The memory of lmcache belongs to its server.
    extra = {"cpu_bytes_to_use": int(size * _GIB)} if backend == "native" else {}
    decisions.record("kv connector", name, f"--kv-offloading-size {size:g}")
    decisions.record(
        "kv_load_failure_policy", "recompute", "what is offloaded is a copy, so nothing is lost"
    )
    return KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
    )
