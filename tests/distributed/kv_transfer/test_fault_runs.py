# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong, requests end with the right tokens or one clear error, and nothing leaks."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.kv_transfer.fault_runs import FAULTS, KINDS, run
from tests.nightly import nightly
from vllm.testing.connectors.checks import _expect_closed, _open_things

SEEDS = {"offload": 0, "files": 10_000, "p2p": 20_000, "nixl": 30_000}
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the nixl library is not installed"
)


@pytest.mark.parametrize(("part", "num_runs"), [(0, 12), *nightly(*((i, 50) for i in range(1, 6)))])
@pytest.mark.parametrize(
    "name", ["offload", "files", "p2p", pytest.param("nixl", marks=needs_nixl)]
)
def test_equal_tokens_or_one_error(name: str, part: int, num_runs: int, tmp_path: Path) -> None:
    """The first run makes what is made once per process."""
    kind, first = KINDS[name], SEEDS[name] + 50 * part
    counts: Counter[str] = run(kind, first, tmp_path)
    before = _open_things()
    for seed in range(first + 1, first + num_runs):
        counts += run(kind, seed, tmp_path)
    _expect_closed(before)
    print(f"{num_runs} runs of {name}: {dict(counts)}")
    assert counts["right"] and counts["loaded"] and counts["struck"]
    if part:
        assert counts["errors"]
        assert name == "offload" or sum(counts[fault] > 0 for fault in FAULTS) > 3
