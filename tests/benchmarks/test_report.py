# SPDX-License-Identifier: Apache-2.0
"""The tables in the docs are what the measurements say."""

from __future__ import annotations

import pytest

from benchmarks import report


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_tables_are_current(page) -> None:  # type: ignore[no-untyped-def]
    text = page.read_text()
    assert report.rendered(text) == text, "run `python benchmarks/report.py`"
    assert "<!-- table" in text


def test_a_typed_figure_is_noticed() -> None:
    text = report.PAGES[0].read_text()
    assert report.rendered(text.replace(" ms |", " us |")) == text


def test_ratios_point_the_right_way() -> None:
    assert report._row("x", "s", 2.0, 6.0, False).endswith("| 3.00 × |")
    assert report._row("x", "tok/s", 6000, 3000, True).endswith("| 2.00 × |")
