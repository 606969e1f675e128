# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sums over ranks, with processes on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import all_reduce


@pytest.mark.usefixtures("forking")
@pytest.mark.skipif(torch.cuda.is_available(), reason="processes on a CPU")
def test_every_size_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    all_reduce.main(["--ranks", "2", "--kb", "8,64", "--repeats", "3"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["kB", "gloo", "then", "norm"]
    assert [int(row.split()[0]) for row in rows] == [8, 64]
    for _, once, with_norm in (map(float, row.split()) for row in rows):
        assert 0 < once and 0 < with_norm


def test_the_time_of_a_sum_is_the_slowest_rank_s() -> None:
    """Repeat by repeat, before the median."""
    ranks = [{"a": [1.0, 9.0, 2.0]}, {"a": [5.0, 1.0, 3.0]}]
    assert all_reduce._slowest(ranks) == {"a": 5.0}
