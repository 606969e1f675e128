# SPDX-License-Identifier: Apache-2.0
"""A device cache of a quarter of what conversations need finds, with a host tier, nearly all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from vllm.testing.connectors import ConnectorCase
from vllm.testing.connectors.checks import prompt, running

NUM_CONVERSATIONS, NUM_TURNS = 10, 5
#: requests of the greatest length; holds everything
AMPLE_ROOM = 40.0


def found(
    kind: str, directory: Path, room: float, host_bytes: int, policy: str = "lru"
) -> tuple[float, float]:
    """Part of the prompt tokens that were found, and part of the device's pages in use at the
    end. Conversations take turns in a random order."""
    extra = {"cpu_bytes_to_use": host_bytes, "eviction_policy": policy}
    case = ConnectorCase(
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    )
    order = [i for i in range(NUM_CONVERSATIONS) for _ in range(NUM_TURNS)]
    random.Random(3).shuffle(order)
    contexts = {i: prompt(i, 40) for i in range(NUM_CONVERSATIONS)}
    hits = total = 0
    with running(case, kind, directory, room=room) as engine:
        for turn, i in enumerate(order):
            name = engine.add(contexts[i], 3)
            engine.settle()
            hits += engine.requests[name].num_cached_tokens
            total += len(contexts[i])
            contexts[i] = [*contexts[i], *engine.tokens[name], *prompt(100 + turn, 15, 0)]
        pages = engine.scheduler.kv_cache_manager.block_pool.pages
        used = pages.num_pages - pages.num_free_pages
        return hits / total, used / pages.num_pages


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_nearly_all_of_the_ideal_hits(kind: str, tmp_path: Path) -> None:
    ideal, used = found(kind, tmp_path / "ideal", AMPLE_ROOM, 50_000)
    quarter = AMPLE_ROOM * used / 4
    alone, full = found(kind, tmp_path / "alone", quarter, 3_000)
    assert full > 0.9 and alone < 0.8 * ideal, "or the device is large enough by itself"
    policy = "lru" if kind == "attention" else "arc"
    tier, _ = found(kind, tmp_path / policy, quarter, 10_000_000, policy)
    assert tier >= 0.95 * ideal
