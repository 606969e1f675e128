# SPDX-License-Identifier: Apache-2.0
"""What `kv_connector_extra_config` of the offloading connector may say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.arc import Arc
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.eviction import EvictionPolicy, Lru
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import ArenaPlan

_KEYS = ("cpu_bytes_to_use", "eviction_policy", "secondary_tiers", "spec_name")
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "arc": Arc}
_TIER_KEYS = ("type", "root_dir", "max_bytes")
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
        _check_keys(extra_config, _KEYS, "kv_connector_extra_config")
        policy = extra_config.get("eviction_policy", "lru")
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise _refused("eviction_policy", policy, f"choose one of {', '.join(_POLICIES)}")
        spec = extra_config.get("spec_name", _SPECS[0])
        if spec not in _SPECS:
            raise _refused("spec_name", spec, f"choose one of {', '.join(_SPECS)}, or leave it out")
        return cls(
            _positive_bytes(extra_config, "cpu_bytes_to_use"),
            _file_tier(extra_config.get("secondary_tiers", [])),
            _POLICIES[policy],
        )

    def host_pages(self, plan: ArenaPlan, num_ranks: int) -> int:
        """Pages of host memory per rank; `VLLMValidationError` if not one fits."""
        pages = self.cpu_bytes // num_ranks // plan.page_bytes
        if pages < 1:
            raise _refused(
                "cpu_bytes_to_use",
                self.cpu_bytes,
                f"one page of this model's state takes {plan.page_bytes} bytes on each of "
                f"{num_ranks} ranks; give at least {plan.page_bytes * num_ranks} bytes",
            )
        return pages

    def file_pages(self, plan: ArenaPlan, num_ranks: int) -> int:
        """As `host_pages`, of the files; 0 without a file tier."""
        if self.files is None:
            return 0
        pages = self.files.max_bytes // num_ranks // plan.page_bytes
        if pages < 1:
            needed = plan.page_bytes * num_ranks
            raise _refused("max_bytes", self.files.max_bytes, f"give at least {needed} bytes")
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
    if not isinstance(tiers, list | tuple) or len(tiers) > 1:
        raise _refused("secondary_tiers", tiers, "give a list of at most one tier")
    if not tiers:
        return None
    [tier] = tiers
    _check_keys(tier, _TIER_KEYS, "secondary_tiers[0]")
    if tier.get("type") != "fs":
        raise _refused("secondary_tiers[0].type", tier.get("type"), "the only type is 'fs', files")
    if not tier.get("root_dir"):
        raise _refused("secondary_tiers[0].root_dir", tier.get("root_dir"), "name a directory")
    max_bytes = _positive_bytes({"max_bytes": _FILE_BYTES, **tier}, "max_bytes")
    return FileTierSettings(os.path.abspath(os.fspath(tier["root_dir"])), max_bytes)


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            raise _refused(key, given[key], f"{where} knows {', '.join(known)}")


def _positive_bytes(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _refused(key, value, "give a positive number of bytes")
    return int(value)


def _refused(key: str, value: Any, instead: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"OffloadingConnector: {key} {value!r}: {instead}", parameter=key, value=value
    )
