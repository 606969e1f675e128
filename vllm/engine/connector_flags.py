# SPDX-License-Identifier: Apache-2.0
"""`--kv-offloading-size` and `--capture-live` as the connectors that they stand for, and the
extraction."""

from __future__ import annotations

from typing import Any

from vllm import decisions
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig
from vllm.config.speculative import EXTRACT, LAYER_IDS_KEY, SpeculativeConfig
from vllm.exceptions import VLLMValidationError

_OFFLOADING = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
_CAPTURING = "LiveCaptureConnector"
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
    name = _OFFLOADING[backend]
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


def capture_connector(
    cache: CacheConfig, transfer: KVTransferConfig | None
) -> KVTransferConfig | None:
    """The engine's connector: `transfer`, or the one that captures live requests.

    Raises `VLLMValidationError` when both are asked for.
    """
    rate = cache.capture_live
    if rate is None:
        return transfer
    if transfer is not None and transfer.kv_connector is not None:
        raise _error(
            f"--capture-live and {transfer.kv_connector} (--kv-transfer-config or "
            "--kv-offloading-size) both need a connector; leave the flag out, list "
            f"{_CAPTURING} with the other one as children of a MultiConnector, and ask for "
            f"{EXTRACT} in --speculative-config",
            rate,
        )
    decisions.record("kv connector", _CAPTURING, f"--capture-live {rate:g}")
    extra: dict[str, Any] = {
        "shared_storage_path": cache.capture_live_path,
        "capture_rate": rate,
        "capture_bytes": cache.capture_live_bytes,
    }
    return KVTransferConfig(
        kv_connector=_CAPTURING, kv_role="kv_producer", kv_connector_extra_config=extra
    )


def capture_extraction(
    cache: CacheConfig,
    speculative: SpeculativeConfig | None,
    model: ModelConfig,
    parallel: ParallelConfig,
) -> SpeculativeConfig | None:
    """`speculative`, or extraction with it as the drafter beside it.

    What a drafter reads is stored, and the target's output after it; without one that reads
    anything, what drafters usually read. Raises `VLLMValidationError` where extraction is
    configured already, or where several engines would write into one directory.
    """
    if cache.capture_live is None:
        return speculative
    if speculative is not None and speculative.uses_extract_hidden_states():
        raise _error(
            f"--capture-live extracts hidden states itself; leave {EXTRACT} out of "
            "--speculative-config, and write its drafter there",
            cache.capture_live,
        )
    if len(parallel.local_ranks) > 1:
        raise _error(
            "--capture-live and --data-parallel-size: engines cannot share a dataset; start a "
            "server for each with --data-parallel-rank and its own --capture-live-path",
            cache.capture_live,
        )
    num_layers = model.get_num_layers()
    read = speculative.draft_settings.layer_ids if speculative is not None else ()
    if not read:
        usual = (2, num_layers // 2, num_layers - 3)
        read = tuple(sorted({i for i in usual if 0 <= i < num_layers}))
        decisions.record("captured layers", [*read, num_layers], "what EAGLE-3 drafters read")
    given: dict[str, Any] = {"hf_config": {LAYER_IDS_KEY: [*read, num_layers]}}
    return SpeculativeConfig(
        method=EXTRACT,
        num_speculative_tokens=1,
        draft_model_config=given,
        drafter=None if speculative is None else speculative.as_given(),
        target_model_config=model,
        target_parallel_config=parallel,
    )


def _error(message: str, value: float) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="capture_live", value=value)
