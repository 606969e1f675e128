# SPDX-License-Identifier: Apache-2.0
"""benchmarks.forced_acceptance: drafters run; as many drafts are accepted as is asked."""

from __future__ import annotations

import os

import pytest
from tiny_models import tiny_model

from benchmarks import forced_acceptance
from benchmarks.draft_tables import rows
from benchmarks.forced_acceptance import PLAIN, mean_tokens, measure, predicted, rows_of
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
    assert predicted("eagle3", 256, 0.8, found) == pytest.approx(1.8 * 3 / 5.05), "one draft"
    assert predicted("eagle3", 256, 0.5, found) == 1.0, "nothing is drafted"


def test_a_row_stands_beside_both_engines_without_drafts() -> None:
    """Their mean, and how far apart they are; the table says when nothing was drafted."""

    def steps(us: float, tokens: float) -> dict[str, dict[str, float]]:
        row = {"step_us": us, "tokens_per_step": tokens, "tokens_per_s": 1e6 * tokens / us}
        return {str(count): row for count in forced_acceptance.TOKENS}

    result = {name: steps(us, 1.0) for name, us in zip(PLAIN, (1000.0, 1100.0), strict=True)}
    sizes = {"weights_bytes": 100 * 10**9, "drafter_bytes": 0}
    result["verify"] = steps(1155.0, 2.84) | sizes | {"256": steps(1050.0, 1.0)["256"]}  # type: ignore[operator]
    found = rows_of("verify", result, 0.8)
    assert [row["requests"] for row in found] == list(forced_acceptance.TOKENS)
    assert found[0]["plain_us"] == 1050
    assert found[0]["plain_spread"] == 0.1
    assert found[0]["step_by_plain"] == 1.1
    assert found[0]["ratio_at_mean"] == pytest.approx(2.952 / 1.1, abs=0.01)
    assert found[2]["step_by_plain"] == found[2]["ratio_at_mean"] == 1.0
    _, _, first, _, last = rows(found).splitlines()
    assert "| 1 | 1.05 ms ± 5.0 % | 1.16 ms | 1.100 | 2.95 |" in first
    assert "1.05 ms, nothing drafted" in last
    assert last.startswith("|  | 256 |")
