# SPDX-License-Identifier: Apache-2.0
"""Continuing from host memory and files gives the bits of continuing on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.kv_transfer.offload_engines import (
    bits,
    connector_of,
    drain,
    engine,
    evict_device,
    history,
    metric,
    offloading,
    prompt,
    run,
)
from vllm import LLM

FAMILIES = ("llama", "qwen3_sliding", "qwen3_5", "kimi_linear")
RECURRENT = ("qwen3_5", "kimi_linear")


def second_turn(llm: LLM, evict: bool) -> tuple[list[tuple[int, float]], int]:
    (first,) = run(llm, prompt(1, 70))
    if evict:
        evict_device(llm)
    outputs = run(llm, history(first) + prompt(2, 9))
    return bits(outputs), outputs[0].num_cached_tokens or 0


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_a_hit_on_the_device(family: str) -> None:
    with engine(None, family) as llm:
        expected, found = second_turn(llm, evict=False)
    assert found == (81 if family in RECURRENT else 80)
    with engine(offloading(), family) as llm:
        assert second_turn(llm, evict=True) == (expected, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_survive_a_restart(family: str, tmp_path: Path) -> None:
    with engine(None, family) as llm:
        (first,) = run(llm, prompt(1, 70))
        outputs = run(llm, turn := history(first) + prompt(2, 9))
        expected, found = bits(outputs), outputs[0].num_cached_tokens
    with engine(offloading(root=tmp_path), family) as llm:
        run(llm, prompt(1, 70))
        drain(llm)
    with engine(offloading(root=tmp_path), family) as llm:
        outputs = run(llm, turn)
        assert bits(outputs) == expected and outputs[0].num_cached_tokens == found
        evict_device(llm)  # what was read from files is in host memory now
        read = metric(llm, "file_read_bytes")
        assert read > 0 and bits(run(llm, turn)) == expected
        assert metric(llm, "file_read_bytes") == read


def test_hashes_follow_the_seed_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that engines of several directories agree."""
    with engine(offloading(root=tmp_path), "llama") as llm:
        root = connector_of(llm).get_prefix_hash_root()
        assert root is not None
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    for _ in range(2):
        with engine(offloading(root=tmp_path), "llama") as llm:
            assert connector_of(llm).get_prefix_hash_root() is None
            (found,) = run(llm, prompt(1, 70))
            drain(llm)
    assert found.num_cached_tokens == 64
