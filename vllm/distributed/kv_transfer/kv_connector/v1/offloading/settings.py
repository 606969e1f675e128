# SPDX-License-Identifier: Apache-2.0
"""What `kv_connector_extra_config` of the offloading connector may say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.extra_config import ExtraConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.eviction import Arc, EvictionPolicy
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import ArenaPlan

_KEYS = ("cpu_bytes_to_use", "eviction_policy", "secondary_tiers", "spec_name")
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": EvictionPolicy, "arc": Arc}
_TIER_KEYS = ("type", "root_dir", "max_bytes")
_BYTES = "a positive number of bytes"
#: files a tier may fill unless it says otherwise (100 GiB)
_FILE_BYTES = 100 * 2**30


@dataclass(frozen=True)
class FileTierSettings:
    """Files of at most `max_bytes` over all ranks below `root_dir`."""

    root_dir: str
    max_bytes: int


@dataclass(frozen=True)
class OffloadingSettings:
    """`cpu_bytes`: host memory over all ranks; `files`: the tier behind it, if there is one;
    `new_policy`: makes a tier's order of eviction."""

    cpu_bytes: int
    files: FileTierSettings | None
    new_policy: Callable[[], EvictionPolicy]

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> OffloadingSettings:
        """Raises `VLLMValidationError` for unknown keys and values that cannot be honoured."""
        extra = _extra(extra_config)
        extra.check_keys(_KEYS)
        policy = extra_config.get("eviction_policy", "lru")
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise extra.refused("eviction_policy", policy, f"choose one of {', '.join(_POLICIES)}")
        spec = extra_config.get("spec_name", _SPECS[0])
        if spec not in _SPECS:
            instead = f"choose one of {', '.join(_SPECS)}, or leave it out"
            raise extra.refused("spec_name", spec, instead)
        return cls(
            int(extra.positive("cpu_bytes_to_use", what=_BYTES)),
            _file_tier(extra_config.get("secondary_tiers", [])),
            _POLICIES[policy],
        )

    def host_pages(self, plan: ArenaPlan, num_ranks: int) -> int:
        """Pages of host memory per rank; `VLLMValidationError` if not one fits."""
        pages = self.cpu_bytes // num_ranks // plan.page_bytes
        if pages < 1:
            raise _extra().refused(
                "cpu_bytes_to_use",
                self.cpu_bytes,
                f"one page of this model's state takes {plan.page_bytes} bytes on each of "
                f"{num_ranks} ranks; give at least {plan.page_bytes * num_ranks} bytes "
                "(--kv-offloading-size counts GiB)",
            )
        return pages

    def file_pages(self, plan: ArenaPlan, num_ranks: int) -> int:
        """As `host_pages`, of the files; 0 without a file tier."""
        if self.files is None:
            return 0
        pages = self.files.max_bytes // num_ranks // plan.page_bytes
        if pages < 1:
            needed = plan.page_bytes * num_ranks
            raise _extra().refused(
                "secondary_tiers[0].max_bytes",
                self.files.max_bytes,
                f"give at least {needed} bytes",
            )
        return pages


def check_engine(vllm_config: VllmConfig) -> None:
    """What is offloaded is what the prefix cache names."""
    if not vllm_config.cache_config.enable_prefix_caching:
        raise VLLMValidationError(
            "OffloadingConnector keeps what the prefix cache can find: leave out "
            "--no-enable-prefix-caching",
            parameter="enable_prefix_caching",
            value=False,
        )


def _file_tier(tiers: Any) -> FileTierSettings | None:
    refused = _extra().refused
    if not isinstance(tiers, list | tuple) or len(tiers) > 1:
        raise refused("secondary_tiers", tiers, "give a list of at most one tier")
    if not tiers:
        return None
    if not isinstance(tiers[0], Mapping):
        raise refused("secondary_tiers[0]", tiers[0], f"give an object: {', '.join(_TIER_KEYS)}")
    tier = _extra({"max_bytes": _FILE_BYTES, **tiers[0]})
    kind, root = tier.given.get("type"), tier.given.get("root_dir")
    tier.check_keys(_TIER_KEYS, "secondary_tiers[0]")
    if kind != "fs":
        raise refused("secondary_tiers[0].type", kind, "the only type is 'fs', files")
    if not root:
        raise refused("secondary_tiers[0].root_dir", root, "name a directory")
    max_bytes = int(tier.positive("max_bytes", what=_BYTES))
    return FileTierSettings(os.path.abspath(os.fspath(root)), max_bytes)


def _extra(given: Mapping[str, Any] | None = None) -> ExtraConfig:
    return ExtraConfig("OffloadingConnector", given or {})
