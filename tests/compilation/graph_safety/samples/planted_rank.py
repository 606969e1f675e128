# SPDX-License-Identifier: Apache-2.0
"""A hazard that one rank has and the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.compilation.graph_safety.samples.replayed_steps import PLANTS, Plant
from vllm.compilation.graph_safety.ranks import RankFound, check_rank
from vllm.v1.worker.worker import Worker

#: of two ranks, that share layers or have one half each
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


@dataclass(frozen=True)
class PlantedRank:
    """In the place of `check_rank`: the item `hazard` is planted in the runner of one rank."""

    rank: int
    hazard: int

    @property
    def plant(self) -> Plant:
        (plant,) = (plant for plant in PLANTS if plant.hazard == self.hazard)
        return plant

    def __call__(self, worker: Worker, *args: Any) -> RankFound:
        if worker.rank != self.rank:
            return check_rank(worker, *args)
        with self.plant.apply(worker.model_runner):
            return check_rank(worker, *args)
