# SPDX-License-Identifier: Apache-2.0
"""The drafter beside the demo model, for files of the library that neither was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafter_serving import Measured, measure
from example_process import DRAFTER, TRAINED, forked_servers
from own_outputs import Speech, Wanted, make_datasets
from train_drafter import input_layers

from vllm.benchmarks.acceptance import AcceptanceArgs, predict

pytestmark = pytest.mark.slow

PROMPT, OUTPUT, SAMPLES = 64, 128, 12
MEMORY = 64 << 20


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model says after pieces of held-out files, with its hidden states."""
    path = tmp_path_factory.mktemp("shipped") / "held_out"
    layers = input_layers(str(TRAINED))
    speech = Speech(str(TRAINED), layers, PROMPT, OUTPUT, [], MEMORY)
    make_datasets(speech, [Wanted(path, SAMPLES, held_out=True, learn_prompts=False)])
    return path


@pytest.fixture(scope="module")
def served(held_out: Path) -> Measured:
    with forked_servers():
        return measure(str(TRAINED), DRAFTER, held_out, OUTPUT, MEMORY)


@pytest.mark.e2e
def test_a_step_makes_two_tokens(served: Measured) -> None:
    """docs/drafters.md"""
    assert served.length >= 2.0
    assert served.same_texts == served.texts == SAMPLES
    assert served.rates == sorted(served.rates, reverse=True)


@pytest.mark.e2e
def test_it_does_not_live_on_loops_alone(served: Measured) -> None:
    assert 0 < served.loops < 1
    assert served.length_before_loops is not None
    assert 1.5 < served.length_before_loops < served.length


@pytest.mark.e2e
def test_serving_is_as_predicted(held_out: Path, served: Measured) -> None:
    """Within 3 % (docs/drafters.md)."""
    args = AcceptanceArgs(model=str(TRAINED), drafter=str(DRAFTER), dataset=str(held_out))
    predicted = predict(args)
    assert predicted.length == pytest.approx(served.length, rel=0.03)
    assert predicted.rates == pytest.approx(served.rates, abs=0.03)
