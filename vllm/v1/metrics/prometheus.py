# SPDX-License-Identifier: Apache-2.0
"""The registry that `/metrics` shows: our own, so that several engines in one process can follow
each other, plus the standard process metrics."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.multiprocess import MultiProcessCollector

_MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def _new_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


#: where metrics of this process are registered
REGISTRY = _new_registry()


def get_prometheus_registry() -> CollectorRegistry:
    """The registry to export: of all processes when `PROMETHEUS_MULTIPROC_DIR` is set."""
    if not os.environ.get(_MULTIPROC_DIR):
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry
