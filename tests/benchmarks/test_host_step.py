# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host parts runs all of them."""

from __future__ import annotations

from benchmarks.host_step import measure


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
    }
    assert all(len(means) == 2 and min(means) > 0 for means in rounds.values())
