# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host parts runs all of them."""

from __future__ import annotations

from benchmarks.host_step import figures, measure


def test_every_part_is_measured() -> None:
    rounds = measure(batch=3, prompt_len=20, num_rounds=2, steps_per_round=4)
    assert set(rounds) == {
        "schedule",
        "worker",
        "results",
        "update",
        "encode",
        "decode",
        "front end",
        "receive",
    }
    received = rounds["receive"]
    assert len(received) == 3 and min(received) > 0
    parts = [rounds[part] for part in rounds.keys() - {"receive"}]
    assert all(len(means) == 2 and min(means) > 0 for means in parts)
    result = figures(3, rounds)
    assert 0 < result["encode_share"] < 1
    assert 0 < result["encode_ms"] < result["core_ms"]
