# SPDX-License-Identifier: Apache-2.0
"""Which layers each pipeline stage has: consecutive ones, so that the costliest stage is cheapest.

The slowest stage sets the pace of all, and the one with the least memory left bounds the requests.
"""

from collections.abc import Sequence

from vllm import decisions, envs
from vllm.exceptions import VLLMValidationError

MIB = 1 << 20


def partition_layers(
    costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Layers of each stage, at least one; the largest cost of a stage is as small as can be.

    `costs`: of each layer; `first`, `last`: what the first and the last stage have besides layers.
    Of several such partitions one with even stages is taken. Raises `VLLMValidationError` for more
    stages than layers.
    """
    num_layers = len(costs)
    check_enough_layers(num_layers, num_stages)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, end: int) -> float:
        besides = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return sums[end] - sums[start] + besides

    # best[end]: (largest cost, sum of squares, start of the last stage) of the stages so far.
    best = {end: (cost_of(0, 0, end), cost_of(0, 0, end) ** 2) for end in range(1, num_layers + 1)}
    starts: list[dict[int, int]] = [dict.fromkeys(best, 0)]
    for stage in range(1, num_stages):
        found: dict[int, tuple[float, float]] = {}
        chosen: dict[int, int] = {}
        for end in range(stage + 1, num_layers + 1):
            for start in range(stage, end):
                if start not in best:
                    continue
                own, (largest, squares) = cost_of(stage, start, end), best[start]
                candidate = (max(largest, own), squares + own**2)
                if end not in found or candidate < found[end]:
                    found[end], chosen[end] = candidate, start
        best = found
        starts.append(chosen)
    counts: list[int] = []
    end = num_layers
    for chosen in reversed(starts):
        counts.insert(0, end - chosen[end])
        end = chosen[end]
    return counts


def choose_partition(
    costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """`partition_layers` of costs in bytes, or `VLLM_PP_LAYER_PARTITION`; a decision record.

    Raises `VLLMValidationError` where that variable does not fit the model and the stages.
    """
    given = envs.VLLM_PP_LAYER_PARTITION
    if given is not None:
        return _checked(given, len(costs), num_stages)
    counts = partition_layers(costs, num_stages, first, last)
    stages: list[float] = []
    end = 0
    for count in counts:
        stages.append(sum(costs[end : end + count]))
        end += count
    stages[0] += first
    stages[-1] += last
    decisions.record(
        "layers per pipeline stage",
        ",".join(map(str, counts)),
        "the largest stage is as small as can be: "
        + ", ".join(f"{stage / MIB:.1f}" for stage in stages)
        + " MiB of weights and of state of one request of full length; "
        "VLLM_PP_LAYER_PARTITION chooses otherwise",
    )
    return counts


def check_enough_layers(num_layers: int, num_stages: int) -> None:
    """`VLLMValidationError` for more stages than layers."""
    if num_layers < num_stages:
        raise VLLMValidationError(
            f"--pipeline-parallel-size {num_stages}: the model has {num_layers} layers, and each "
            f"stage needs one; use at most {num_layers} stages",
            "pipeline_parallel_size",
            num_stages,
        )


def _checked(counts: list[int], num_layers: int, num_stages: int) -> list[int]:
    text = ",".join(map(str, counts))
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise VLLMValidationError(
            f"VLLM_PP_LAYER_PARTITION={text} must give {num_stages} stages at least one layer "
            f"each, {num_layers} together",
            "VLLM_PP_LAYER_PARTITION",
            text,
        )
    decisions.record("layers per pipeline stage", text, "VLLM_PP_LAYER_PARTITION")
    return counts
