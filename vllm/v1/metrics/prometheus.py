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

_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def _new_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


#: metrics of this process and its HTTP server; every engine has a registry of its own
REGISTRY = _new_registry()


def metrics_text(engine: CollectorRegistry) -> bytes:
    """Of this process and an engine; of all processes when `PROMETHEUS_MULTIPROC_DIR` is set."""
    if not os.environ.get(_MULTIPROC_DIR):
        return generate_latest(REGISTRY) + generate_latest(engine)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry)
