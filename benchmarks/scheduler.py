# SPDX-License-Identifier: Apache-2.0
"""Time of the scheduler's part of a decode step: `python -m benchmarks.scheduler [--batch 256]`.

No model: every request "samples" token 1. Prints milliseconds per step, median and 99th percentile,
for `schedule()` and `update_from_output()`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque

import numpy as np
import torch
from transformers import LlamaConfig

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

_BLOCK_SIZE = 16


def make_scheduler(batch: int, max_model_len: int) -> AsyncScheduler:
    config = VllmConfig(
        model_config=ModelConfig(
            model="benchmark",
            hf_config=LlamaConfig(architectures=["LlamaForCausalLM"]),
            max_model_len=max_model_len,
            skip_tokenizer_init=True,
        ),
        cache_config=CacheConfig(block_size=_BLOCK_SIZE),
        scheduler_config=SchedulerConfig(
            max_num_seqs=batch, max_num_batched_tokens=8192, max_model_len=max_model_len
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(
        block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return AsyncScheduler(config, get_kv_cache_configs(config, [{"layers.0": spec}], [1 << 30])[0])


def make_request(index: int, prompt_len: int, max_tokens: int) -> Request:
    rng = np.random.default_rng(index)
    hasher = get_request_block_hasher(_BLOCK_SIZE, get_hash_fn_by_name("sha256"))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompt = rng.integers(2, 30000, prompt_len).tolist()
    return Request(f"cmpl-{index:032d}", prompt, params, block_hasher=hasher)


def result_of(output: SchedulerOutput) -> ModelRunnerOutput:
    req_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids, [[1] if req_id in output.sampling_req_ids else [] for req_id in req_ids]
    )


def measure(batch: int, prompt_len: int, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each decode step: `schedule()` [steps], `update_from_output()` [steps]."""
    scheduler = make_scheduler(batch, prompt_len + num_steps + 1024)
    for index in range(batch):
        scheduler.add_request(make_request(index, prompt_len, num_steps + 512))
    in_flight: deque[SchedulerOutput] = deque([scheduler.schedule()])
    while scheduler.waiting or len(scheduler.running) < batch:
        in_flight.append(scheduler.schedule())
        scheduler.update_from_output(in_flight[0], result_of(in_flight.popleft()))
    gc.collect()
    gc.freeze()
    times = np.zeros((2, num_steps))
    for step in range(num_steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        times[0, step] = time.perf_counter() - start
        in_flight.append(output)
        done = in_flight.popleft()
        result = result_of(done)
        start = time.perf_counter()
        scheduler.update_from_output(done, result)
        times[1, step] = time.perf_counter() - start
    assert output.total_num_scheduled_tokens == batch
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256, help="running requests")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens")
    parser.add_argument("--steps", type=int, default=500, help="decode steps to time")
    args = parser.parse_args()
    schedule, update = measure(args.batch, args.prompt_len, args.steps)
    print(f"batch {args.batch}, milliseconds per decode step (median, 99th percentile)")
    for name, seconds in (("schedule", schedule), ("update", update), ("both", schedule + update)):
        middle, high = np.percentile(seconds, [50, 99]) * 1000
        print(f"  {name:<10}{middle:8.3f}{high:8.3f}")


if __name__ == "__main__":
    main()
