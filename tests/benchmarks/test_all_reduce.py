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
    assert head.split() == ["kB", "us", "GB/s"]
    assert [int(row.split()[0]) for row in rows] == [8, 64]
    for kb, us, rate in (map(float, row.split()) for row in rows):
        # Two ranks: each takes in and gives out as much as the message has. Printed rounded.
        assert us > 0 and rate == pytest.approx(kb * 1024 / us / 1e3, abs=0.01, rel=0.01)
