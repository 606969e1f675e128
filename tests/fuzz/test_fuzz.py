# SPDX-License-Identifier: Apache-2.0
"""A minute of the fuzzer; `python -m tests.fuzz --hours 8` runs it longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.scenarios import Fuzzer
from tests.nightly import nightly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    with Fuzzer(size=40) as made:
        yield made


@pytest.mark.parametrize("way", ["alone", "pair", "served", "threaded"])
@pytest.mark.parametrize("seed", [1, 2, *nightly(3, 4, 5, 6)])
def test_nothing_is_found(fuzzer: Fuzzer, way: str, seed: int) -> None:
    tally = fuzzer.run(seed, way)
    assert not tally.findings
    assert tally.requests >= 40 and tally.compared + tally.ended_early == tally.requests
