# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/graph-safety.md: before, each is told by its item on its line, and after
nothing is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.compilation.graph_safety.replacement_examples import FILES, Pair, markdown, pairs
from tests.compilation.graph_safety.samples import replacements_replayed
from tests.compilation.graph_safety.samples.replacements_replayed import HIDDEN, TOKENS, Layer
from tests.compilation.graph_safety.test_planted import expected
from vllm.compilation.graph_safety.hazards import HAZARDS
from vllm.compilation.graph_safety.simulator.checked_run import CheckedRun
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.graph_safety.targets import check_file
from vllm.forward_context import ForwardContext, set_forward_context

BY_SOURCE, BY_REPLAYS = FILES
PAGE = Path(__file__).parents[3] / "docs" / "graph-safety.md"
REPLAYED = [pair for pair in pairs() if pair.path == BY_REPLAYS and pair.hazard != 28]


def test_each_item_has_a_pair() -> None:
    assert [pair.hazard for pair in pairs()] == list(HAZARDS)
    assert {pair.hazard for pair in pairs() if pair.path == BY_SOURCE} == {
        hazard.number for hazard in HAZARDS.values() if hazard.static
    }


def test_the_page_shows_them() -> None:
    """`python -m tests.compilation.graph_safety.replacement_examples` prints what it needs."""
    assert markdown() in PAGE.read_text()


def test_source_tells_what_is_before_and_nothing_after() -> None:
    found = {(finding.line, finding.hazard) for finding in check_file(BY_SOURCE).findings}
    assert found == expected(BY_SOURCE) != set()


def _found(layer: Layer) -> set[tuple[str, int, int]]:
    """Of a capture of padding and four steps."""
    recorder = Recorder(set())
    inputs = [torch.ones(TOKENS, HIDDEN), torch.full((TOKENS,), -1)]

    def run() -> Tensor:
        context = None if layer.metadata is None else ForwardContext({}, {"layer": layer.metadata})
        with nullcontext() if context is None else set_forward_context(context):
            result: Tensor = layer(*inputs)
        return result

    layer.prepare(0)
    checked = CheckedRun(run, recorder, guarded=layer.state)
    for step in range(1, 5):
        layer.prepare(step)
        inputs[0].fill_(step)
        inputs[1].copy_(torch.arange(TOKENS) + step)
        checked.step(run)
    recorder.check_after()
    return {(finding.path, finding.line, finding.hazard) for finding in recorder.findings}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("pair", REPLAYED, ids=lambda pair: pair.name)
def test_replays_tell_what_is_before_and_nothing_after(pair: Pair) -> None:
    before, after = (
        getattr(replacements_replayed, f"{pair.name}{side}")() for side in ("Before", "After")
    )
    assert _found(before) == {(str(BY_REPLAYS), pair.line, pair.hazard)}
    assert _found(after) == set()


def test_numbers_stay_in_range_after() -> None:
    """In a step of a model: `test_model_steps.py`."""
    x, position = torch.tensor([[1e3, 0.0, 1.0, 2.0]]), torch.zeros(1, dtype=torch.int64)
    assert not replacements_replayed.RangeBefore()(x, position).isfinite().all()
    assert replacements_replayed.RangeAfter()(x, position).isfinite().all()
