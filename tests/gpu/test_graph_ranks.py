# SPDX-License-Identifier: Apache-2.0
"""`vllm graph-check -tp 2` and `-pp 2` on two GPUs: both ranks are checked, each on its own, with
collectives inside of graphs; what one of them finds is named with it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from tests.compilation.graph_safety.samples.planted_rank import LAYOUTS, PlantedRank
from vllm.compilation.graph_safety import ranks
from vllm.compilation.graph_safety.model_steps import check_model_steps
from vllm.compilation.graph_safety.report import Report
from vllm.engine.arg_utils import EngineArgs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]


def _check(family: str, layout: str) -> Report:
    args = EngineArgs(
        model=str(tiny_model(family, torch.bfloat16)),
        max_num_seqs=40,
        max_num_batched_tokens=256,
        max_model_len=1024,
        **LAYOUTS[layout],
    )
    return check_model_steps(args, 512)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_every_rank_is_clean(family: str, layout: str) -> None:
    report = _check(family, layout)
    assert report.findings == ()
    (said,) = report.checks
    assert "on a GPU: " in said and "512 replayed twice" in said
    assert "decodes of up to 40 requests" in said, "at the sizes to serve with"
    assert "--tensor-parallel-size" not in said and "--pipeline-parallel-size" not in said
    of_rank = {one.name.partition(":")[0] for one in report.captures}
    assert of_rank == {"rank 0", "rank 1"}
    assert all(one.captured and not one.stale for one in report.captures)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hazard_of_one_rank_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    # Stale tables of blocks (22) may end the process of a GPU before they are named.
    planted = PlantedRank(rank=1, hazard=21)
    monkeypatch.setattr(ranks, "check_rank", planted)
    report = _check("llama", layout)
    places = {(one.path, one.line, one.hazard): report.modes[one] for one in report.findings}
    assert places == {planted.plant.place: "in a replayed step on rank 1"}, report.findings
