# SPDX-License-Identifier: Apache-2.0
"""Continuing from host memory and files gives the bits of continuing on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
from tests.tiny_models import tiny_model
from vllm import LLM

FAMILIES = ("llama", "qwen3_sliding", "qwen3_5", "kimi_linear")
RECURRENT = ("qwen3_5", "kimi_linear")
#: of a draft model's sliding layers
WINDOW = 25


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


# ---- beside a drafter ---------------------------------------------------------------------------


def with_draft_model(family: str, path: Path) -> dict[str, Any]:
    """The target again where it can draft, with a window of its own: a group that the target does
    not have, and drafts that are accepted as long as its state is right."""
    draft = tiny_model("qwen3_sliding")
    if family == "qwen3_sliding":
        shutil.copytree(draft, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW}))
        draft = path
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    return {"speculative_config": speculation}


def drafted(llm: LLM) -> dict[str, Any]:
    """How many tokens were drafted and accepted, in all and by their place."""
    names = ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    found = {one.name.removeprefix("vllm:spec_decode_num_"): one for one in llm.get_metrics()}
    return {name: {**vars(found[name]), "labels": None} for name in names}


@pytest.mark.parametrize("family", ["qwen3_sliding", "qwen3_5"])
def test_a_drafters_state_comes_back_with_the_targets(family: str, tmp_path: Path) -> None:
    """So the tokens, their bits and what is drafted are those of a hit on the device, after all of
    it was evicted and after a restart."""
    options = with_draft_model(family, tmp_path / "draft")
    root = tmp_path / "files"
    with engine(None, family, **options) as llm:
        (first,) = run(llm, prompt(1, 70))
        before = drafted(llm)
        outputs = run(llm, turn := history(first) + prompt(2, 9))
        expected, found, after = bits(outputs), outputs[0].num_cached_tokens, drafted(llm)
    assert found == (81 if family in RECURRENT else 80) and before != after
    if family == "qwen3_sliding":
        assert after["accepted_tokens"]["value"] > before["accepted_tokens"]["value"] > 0
    with engine(offloading(root=root), family, **options) as llm:
        groups = connector_of(llm)._scheduling._host.plan.groups
        run(llm, prompt(1, 70))
        evict_device(llm)
        stored = {group for group in range(len(groups)) if has_group(llm, group)}
        assert len(stored) == len(groups) > 1
        assert drafted(llm) == before
        outputs = run(llm, turn)
        assert (bits(outputs), outputs[0].num_cached_tokens) == (expected, found)
        assert drafted(llm) == after
        drain(llm)
    with engine(offloading(root=root), family, **options) as llm:
        outputs = run(llm, turn)  # which was stored as well
        assert bits(outputs) == expected and (outputs[0].num_cached_tokens or 0) >= found
        assert metric(llm, "file_read_bytes") > 0


def has_group(llm: LLM, group: int) -> bool:
    """Whether host memory holds a block of the group."""
    cached = connector_of(llm)._scheduling._host._cached.values()
    return any(block.group_id == group for block in cached)
