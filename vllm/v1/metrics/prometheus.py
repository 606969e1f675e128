# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` shows: the metrics of this process, and those of the engine served."""

from __future__ import annotations

import os

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from vllm.exceptions import VLLMValidationError

_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def _new_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


#: metrics of this process and its HTTP server; every engine has a registry of its own
REGISTRY = _new_registry()


def check_multiprocess_directory() -> None:
    """`VLLMValidationError` where the metrics of several processes have no place, which
    prometheus_client notices once it keeps the first one."""
    path = os.environ.get(_MULTIPROC_DIR)
    if path and not os.path.isdir(path):
        raise VLLMValidationError(
            f"{_MULTIPROC_DIR}={path}: there is no such directory; make it, or unset the variable",
            parameter=_MULTIPROC_DIR,
            value=path,
        )


def metrics_text(engine: CollectorRegistry) -> bytes:
    """Of this process and an engine; of all processes when `PROMETHEUS_MULTIPROC_DIR` is set."""
    if not os.environ.get(_MULTIPROC_DIR):
        return generate_latest(REGISTRY) + generate_latest(engine)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry)
