# SPDX-License-Identifier: Apache-2.0
"""Which kernels a start needs, kept on disk so that the next start need not find out.

A plan holds for one configuration on one GPU, for one of several ranks (a stage has layers of its
own, and a kernel may be compiled for a rank's numbers), and only for the code that it was made
with. It says what to compile ahead and nothing else: with a wrong one a kernel is compiled late, or
in vain.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from vllm import envs
from vllm.config import VllmConfig
from vllm.kernels.triton.compile_ahead import Variant
from vllm.kernels.triton.configs import device_configs
from vllm.logger import init_logger

logger = init_logger(__name__)

_PACKAGE = Path(__file__).parents[2]
#: what of the package decides which kernels are launched
_CODE = (".py", ".so", ".json")
#: fields that differ between starts of the same configuration
_OF_ONE_START = frozenset(
    {
        "instance_id",
        "engine_id",
        "meeting_directory",
        "ready_in",
        "ready_by_s",
        "static_forward_context",
    }
)
#: fields that differ between replicas, whose kernels are the same unless each has its own experts
_OF_ONE_REPLICA = frozenset(
    {
        "data_parallel_rank",
        "data_parallel_index",
        "asked_data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
    }
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class KernelPlan:
    """The stored plan of a configuration."""

    def __init__(self, path: Path, made_with: str) -> None:
        self.path = path
        self._made_with = made_with

    @classmethod
    def of(cls, vllm_config: VllmConfig, device: torch.device) -> KernelPlan | None:
        """None where the configuration holds an object without a value that could be compared."""
        ignored = _OF_ONE_START
        if not vllm_config.parallel_config.replicas_share_experts:
            ignored |= _OF_ONE_REPLICA
        text = "\n".join((*_values(vllm_config, ignored), repr(device_configs(device))))
        if _ADDRESS.search(text):
            return None
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        folder = Path(envs.VLLM_CACHE_ROOT).expanduser() / "kernel_plans"
        return cls(folder / f"{name}.json", _code_version())

    def load(self) -> list[Variant] | None:
        """The variants to compile; None without a plan that was made with this code."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if stored["made_with"] != self._made_with:
            return None
        return [
            Variant(kernel, what, _function(kernel).preload) for kernel, what in stored["variants"]
        ]

    def store(self, variants: list[Variant]) -> None:
        """Keep what was found, unless the disk does not allow it or a kernel comes from elsewhere,
        whose changes would go unnoticed."""
        foreign = [one.kernel for one in variants if not _is_ours(one)]
        if foreign:
            logger.info("the kernels of this start are not remembered, for %s", foreign[0])
            return
        found = [(one.kernel, one.specialization) for one in variants]
        text = json.dumps({"made_with": self._made_with, "variants": found})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError as error:
            logger.warning("the kernels of this start are not remembered: %s", error)

    def discard(self) -> None:
        """The plan was incomplete: the next start finds its kernels anew."""
        self.path.unlink(missing_ok=True)


def _values(config: Any, ignored: frozenset[str], prefix: str = "") -> Iterator[str]:
    """One line per setting, those of configs inside configs too, but for the `ignored` fields."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ignored:
            continue
        if dataclasses.is_dataclass(value):
            yield from _values(value, ignored, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}={value!r}"


@cache
def _code_version() -> str:
    """Of torch, Triton and every file of this package, by size and time."""
    lines = [torch.__version__, triton.__version__]
    for folder, folders, names in os.walk(_PACKAGE):
        folders.sort()
        for name in sorted(names):
            if name.endswith(_CODE):
                status = os.stat(os.path.join(folder, name))
                lines.append(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_ours(one: Variant) -> bool:
    """Whether the variant's function is what this package has under its name."""
    return one.kernel.startswith("vllm.") and _function(one.kernel).preload == one.compile


def _function(kernel: str) -> Any:
    """The Triton function with a dotted name."""
    module, _, name = kernel.rpartition(".")
    return getattr(importlib.import_module(module), name)
