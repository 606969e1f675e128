# SPDX-License-Identifier: Apache-2.0
"""benchmarks.forced_acceptance: drafters run; as many drafts are accepted as is asked."""

from __future__ import annotations

import os

import pytest
from tiny_models import tiny_model

from benchmarks import forced_acceptance
from benchmarks.forced_acceptance import mean_tokens, measure, predicted
from vllm.config.draft_methods import DRAFT_METHODS

SMALL = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(("arm", "bounds"), [("eagle3", (2.2, 3.7)), ("dflash:7", (2.6, 6.0))])
def test_drafts_are_accepted(
    arm: str, bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter runs: without weights its own drafts would hardly ever be accepted."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "FORCED_ACCEPTANCE"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    for name in ("eagle3", "dflash"):
        monkeypatch.setitem(DRAFT_METHODS, name, DRAFT_METHODS[name])  # type: ignore[misc]
    monkeypatch.setattr(forced_acceptance, "LAYER", forced_acceptance.LAYER | SMALL)
    words = [f'model="{tiny_model("qwen3_5")}"', "max_model_len=512", "max_num_seqs=4"]
    words += ['dtype="float32"', "kv_cache_memory_bytes=33554432", "max_num_batched_tokens=256"]
    found = measure(arm, 0.8, words, {2: 120})
    assert found["drafter_bytes"] > 0
    assert bounds[0] < found["2"]["tokens_per_step"] < bounds[1]
    assert found["2"]["tokens_per_s"] > 0


def test_what_is_predicted() -> None:
    assert mean_tokens(3, 0.8) == pytest.approx(2.952)
    sizes = {"weights_bytes": 100 * 10**9, "drafter_bytes": 5 * 10**9}
    found = {"eagle3": sizes, "dflash:3": sizes}
    serial, block = (predicted(arm, 1, 0.8, found) for arm in found)
    assert 2.4 < serial < block < 2.952
    assert predicted("eagle3", 256, 0.8, found) == 1.0, "nothing is drafted"
