# SPDX-License-Identifier: Apache-2.0
"""What the host tier's benchmark says, on a small model."""

from __future__ import annotations

import pytest

from benchmarks import offloading


def figures(part: str, *flags: str) -> dict[str, float]:
    args = offloading.make_parser().parse_args(["--repeats", "1", "--host-mb", "40", *flags])
    measure = {"reload": offloading.measure_reload, "trace": offloading.measure_trace}
    return measure[part](args)


def test_a_prompt_is_loaded_and_not_computed() -> None:
    found = figures("reload", "--reload-tokens", "512")
    computed, loaded = found["ms to compute 512 tokens"], found["ms to load them"]
    assert found["times faster"] == pytest.approx(computed / loaded)
    assert computed > 0 and loaded > 0


def test_the_tier_finds_what_all_the_memory_finds() -> None:
    found = figures("trace", "--conversations", "2", "--scale", "0.05", "--trace-mb", "100")
    assert 0 < found["found with a quarter"] < found["found with all of it"]
    assert found["of the ideal hits"] == pytest.approx(1.0, abs=0.05)
