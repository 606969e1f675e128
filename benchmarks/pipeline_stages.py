# SPDX-License-Identifier: Apache-2.0
"""How busy pipeline stages are: `python -m benchmarks.pipeline_stages [--stages 2] [--cost-ms 20]`.

Every stage of a tiny model on the CPU sleeps in each step, as long as a device of its own would
compute. Stages that worked one after the other would need `stages * cost` per step; printed is how
many times faster the steps are, which is at most the number of stages.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.inprocess import scheduler_of
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.worker.worker import Worker


def slow(cost_s: float) -> Callable[[Worker], None]:
    """Makes each step of a worker last that long."""

    def install(worker: Worker) -> None:
        model = worker.get_model()
        forward = model.forward

        def slowed(*args: Any) -> Any:
            time.sleep(cost_s)
            return forward(*args)

        model.forward = slowed

    return install


def count_steps(llm: LLM) -> Callable[[], int]:
    """Steps with tokens that the engine's scheduler makes from now on."""
    scheduler = scheduler_of(llm.llm_engine)
    schedule, count = scheduler.schedule, 0

    def counted() -> Any:
        nonlocal count
        output = schedule()
        count += output.total_num_scheduled_tokens > 0
        return output

    scheduler.schedule = counted  # type: ignore[method-assign]
    return lambda: count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a small checkpoint with at least as many layers as stages")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--cost-ms", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = LLM(
        options.model,
        pipeline_parallel_size=options.stages,
        max_model_len=512,
        kv_cache_memory_bytes=64 * 2**20,
    )
    cost_s = options.cost_ms / 1000
    llm.collective_rpc(slow(cost_s))
    steps = count_steps(llm)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    batch = [TokensPrompt(prompt_token_ids=[1, 2, 3]) for _ in range(options.requests)]
    started = time.perf_counter()
    llm.generate(batch, params, use_tqdm=False)
    wall_s = time.perf_counter() - started
    serial_s = steps() * options.stages * cost_s
    print(f"{steps()} steps of {options.stages} x {options.cost_ms:.0f} ms in {wall_s:.2f} s; ")
    print(f"one stage after the other: {serial_s:.2f} s, {serial_s / wall_s:.2f} times as long")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
