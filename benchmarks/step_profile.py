# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: device time per kernel, and the gaps between kernels.

    python -m benchmarks.step_profile docs/measurements/h200_steps.json

The engine of `benchmarks/offline.py`, in this process; a window of decode steps at three batch
sizes and of prefill steps under torch's profiler. Per window: wall time per step, device time per
step, and every kernel's launches and microseconds per step. Needs one GPU of at least 40 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.offline import default_settings, parse_settings, random_prompts

_DECODES = (1, 8, 64, 256)
_STEPS = 40


def _device_kernels(prof: profile) -> dict[str, tuple[int, float]]:
    """Kernel name -> (launches, microseconds)."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.device_time)
    return {name: (len(times), sum(times)) for name, times in found.items()}


def _window(llm: Any, steps: int) -> dict[str, Any]:
    """Time `steps` engine steps without the profiler, then profile as many."""
    engine = llm.llm_engine
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / steps * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    kernels = {
        name: {"launches": count / steps, "us": micros / steps}
        for name, (count, micros) in _device_kernels(prof).items()
    }
    busy = sum(kernel["us"] for kernel in kernels.values())
    return {"wall_us": wall, "device_us": busy, "kernels": kernels}


def _report(name: str, window: dict[str, Any], top: int) -> None:
    print(f"\n{name}: {window['wall_us']:.0f} us per step, kernels {window['device_us']:.0f} us")
    rows = sorted(window["kernels"].items(), key=lambda item: -item[1]["us"])
    for kernel, row in rows[:top]:
        print(f"  {row['us']:9.1f} us {row['launches']:7.1f} x  {kernel[:90]}", flush=True)


def _drain(llm: Any) -> None:
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def _decode(llm: Any, count: int, params: Any) -> dict[str, Any]:
    for i, prompt in enumerate(random_prompts(random.Random(count), count, 128)):
        llm.llm_engine.add_request(f"decode-{count}-{i}", prompt, params)
    for _ in range(12 + count // 64):
        llm.llm_engine.step()
    window = _window(llm, _STEPS)
    _drain(llm)
    return window


def _prefill(llm: Any, length: int, params: Any) -> dict[str, Any]:
    for i, prompt in enumerate(random_prompts(random.Random(length), 64, length)):
        llm.llm_engine.add_request(f"prefill-{length}-{i}", prompt, params)
    for _ in range(4):
        llm.llm_engine.step()
    window = _window(llm, 8)
    _drain(llm)
    return window


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--top", type=int, default=24, help="kernels to print per window")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(**(default_settings() | parse_settings(args.settings)))

    def greedy(tokens: int) -> Any:
        return SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )

    result: dict[str, Any] = {}
    for count in _DECODES:
        result[f"decode_{count}"] = _decode(llm, count, greedy(2 * _STEPS + 40))
    result["prefill_4096"] = _prefill(llm, 4096, greedy(1))
    for name, window in result.items():
        _report(name, window, args.top)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
