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
    flags = ("--conversations", "2", "--scale", "0.05", "--trace-mb", "100")
    found = figures("trace", *flags, "--device-part", "0.25")
    assert 0 < found["found with the part"] < found["found with all of it"]
    assert found["of the ideal hits"] == pytest.approx(1.0, abs=0.05)
    expected = found["found with the part"] / found["found with all of it"]
    assert found["of the ideal hits alone"] == pytest.approx(expected)


def test_it_says_when_the_device_needs_no_tier() -> None:
    """Conversations that take turns one after another fit where all of them do not."""
    assert offloading.no_difference(0.9, 0.8) is None
    notice = offloading.no_difference(0.767, 0.765)
    assert notice is not None and "alone finds 76.5%, all of it 76.7%" in notice


def test_the_device_alone_is_too_small_for_the_trace() -> None:
    """As the flags are set, with shorter texts: by the blocks' names, without an engine."""
    args = offloading.make_parser().parse_args(["--conversations", "60", "--scale", "0.1"])
    prompts = [offloading._chain(request) for request in offloading._trace(args)[0]]
    blocks = len({name for chain, _ in prompts for name in chain})
    ideal, alone = (
        offloading._found(prompts, pages, 1, offloading.EvictionPolicy())
        for pages in (blocks, int(blocks * args.device_part))
    )
    assert alone < 0.6 * ideal
