# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a supernet's placements: measured, as their layers add up, and as predicted.

    python -m benchmarks.placements docs/measurements/h200_placements.json

One engine with random weights on the dimensions of Super Apriel 15B, 48 layers of four mixers. Its
placement is changed, and its worker runs steps of made-up requests in the middle of their outputs:
their pages hold random numbers, so that no prompt has to be computed. A step's time is from one
result to the next, with two steps in flight.

Uniform placements give what a layer of each kind costs; a mixture of as many layers should take
their mean, weighted by how many it has of each. Needs one GPU of at least 139 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.offline import parse_settings
from benchmarks.placement_tables import MIXERS, Measured
from vllm import SamplingParams
from vllm.model_executor.decode_work import decode_work
from vllm.v1.core.decode_cost import device_speed, predict
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.worker import Worker

if TYPE_CHECKING:
    from vllm import LLM

#: layers of each mixer. The presets are those of arXiv 2604.19877; which layers they are is not
#: published, so each kind is spread evenly. a12_g1_k11 stands twice in 48 layers.
MIXTURES = {
    "a12_g1_k11": (24, 0, 22, 2),
    "Reg Lklhd-26": (12, 26, 6, 4),
    "Reg Lklhd-10": (0, 10, 5, 33),
    "Idealized All-18": (13, 32, 1, 2),
    "Reg Lklhd-18": (3, 25, 4, 16),
    "Reg Lklhd-13": (0, 16, 13, 19),
    "Idealized All-6": (0, 30, 5, 13),
}
#: requests, and tokens of each: the last is what fits beside the weights of all mixers
POINTS = ((1, 1024), (32, 1024), (64, 1024), (1, 16384), (24, 16384))
#: steps that are not timed, and then the rounds, of which the fastest counts; journals of recurrent
#: layers are committed every eighth step
_WARM, _ROUNDS, _STEPS = 8, 2, 16
_IN_FLIGHT = 2
_RANDOM_BYTES = 1 << 28
_sets = count(1)


def settings(points: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What is passed to `LLM(...)`."""
    return {
        "model": str(Path(__file__).parent / "super_apriel_15b"),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": max(context for _, context in points) + _WARM + _ROUNDS * _STEPS,
        "max_num_seqs": max(batch for batch, _ in points),
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.92,
        "enable_prefix_caching": False,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({batch for batch, _ in points}),
        },
        # All kinds, so that the kernels of each are compiled at the start.
        "placement": spread((12, 12, 12, 12)),
    }


def spread(counts: Sequence[int]) -> list[str]:
    """The layers' mixers: so many of each of `MIXERS`, as evenly as can be."""
    places = [
        ((i + 0.5) / number, mixer)
        for mixer, number in zip(MIXERS, counts, strict=True)
        for i in range(number)
    ]
    return [mixer for _, mixer in sorted(places)]


class Decodes:
    """`batch` made-up requests that decode, from `length` tokens on, up to `limit`."""

    def __init__(self, runner: ModelRunner, batch: int, length: int, limit: int) -> None:
        self._runner, self._limit = runner, limit
        self._length, self._set = length, next(_sets)
        self._names = [f"decode-{self._set}-{i}" for i in range(batch)]
        self._scheduled = dict.fromkeys(self._names, 1)
        greedy = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        tokens = [1] * (length + 1)
        self._new = [
            NewRequestData(name, tokens, [], greedy, None, blocks, length)
            for name, blocks in zip(self._names, self._blocks(), strict=True)
        ]

    def _blocks(self) -> list[tuple[list[int], ...]]:
        """By request, of each group: blocks in pages that no other group has. ValueError for more
        than there are."""
        plan, page, found = self._runner.arena.plan, 1, []
        for group, table in zip(plan.groups, self._runner.block_tables.groups, strict=True):
            size = table.spec.blocks_for(self._limit)
            first = page * group.blocks_per_page
            ends = range(first, first + len(self._names) * size, size)
            found.append([list(range(begin, begin + size)) for begin in ends])
            page += -(-len(ends) * size // group.blocks_per_page)
        if page > plan.num_pages:
            raise ValueError(
                f"{len(self._names)} requests of {self._limit} tokens need {page} pages, but there "
                f"are {plan.num_pages}: give more memory or fewer requests"
            )
        return list(zip(*found, strict=True))

    def _step(self, number: int) -> SchedulerOutput:
        rows = len(self._names)
        new, self._new = self._new, []
        cached = CachedRequestData(
            req_ids=self._names,
            new_block_ids=[None] * rows,
            num_computed_tokens=[self._length + number] * rows,
            num_output_tokens=[number] * rows,
        )
        step = SchedulerOutput(new, CachedRequestData() if new else cached, self._scheduled, rows)
        step.sampling_req_ids = set(self._names)
        step.decode_set_id = 0 if new else self._set
        return step

    def run(self) -> float:
        """Seconds per step."""
        pending, ends = deque[Any](), []
        for number in range(_WARM + _ROUNDS * _STEPS):
            pending.append(self._runner.execute_model(self._step(number)))
            if len(pending) == _IN_FLIGHT:
                pending.popleft().get_output()
                ends.append(time.perf_counter())
        for one in pending:
            one.get_output()
            ends.append(time.perf_counter())
        marks = ends[_WARM - 1 :: _STEPS]
        return min(b - a for a, b in zip(marks, marks[1:], strict=False)) / _STEPS

    def close(self) -> None:
        """They are gone."""
        done = SchedulerOutput.make_empty()
        done.finished_req_ids = set(self._names)
        self._runner.forget(done)


def fill(memory: Tensor) -> None:
    """`uint8 [bytes]` with numbers that are finite and below 1, as bfloat16 and as fp32; they come
    again after more bytes than caches hold."""
    size = min(len(memory), _RANDOM_BYTES)
    numbers = memory[:size].random_(0x20, 0x3F)
    for begin in range(size, len(memory), size):
        part = memory[begin : begin + size]
        part.copy_(numbers[: len(part)])


def step_times(
    worker: Worker, points: Sequence[tuple[int, int]], device: str
) -> list[tuple[float, float]]:
    """On the worker: milliseconds at each point, measured and predicted."""
    runner, found = worker.model_runner, []
    fill(runner.arena.buffer)
    work = decode_work(worker.vllm_config, runner.model)
    steps = _WARM + _ROUNDS * _STEPS
    for batch, context in points:
        decodes = Decodes(runner, batch, context - steps // 2, context + steps)
        seconds = decodes.run()
        decodes.close()
        predicted = predict(work, device_speed(device), batch, context).seconds
        found.append((seconds * 1e3, predicted * 1e3))
    return found


def measure(
    llm: LLM,
    name: str,
    placement: Sequence[str] | str,
    points: Sequence[tuple[int, int]],
    device: str,
) -> list[Measured]:
    """A placement, which is called `name`, at every point, of the engine in this process."""
    (placed,) = llm.change_placement(placement)
    layers = dict(Counter(placed.values()))
    (times,) = llm.collective_rpc(step_times, args=(points, device))
    return [
        Measured(name, layers, batch, context, ms, explain_ms)
        for (batch, context), (ms, explain_ms) in zip(points, times, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--device", default="H200", help="as --decode-device of vllm explain")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(**(settings(POINTS) | parse_settings(args.settings)))
    placements: dict[str, Sequence[str] | str] = {f"all-{name}": f"all-{name}" for name in MIXERS}
    placements |= {name: spread(counts) for name, counts in MIXTURES.items()}
    found: list[Measured] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name, placement in placements.items():
        steps = measure(llm, name, placement, POINTS, args.device)
        print(name, *(f"{one.ms:.3f} ({one.explain_ms:.3f})" for one in steps), flush=True)
        found += steps
        args.output.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
