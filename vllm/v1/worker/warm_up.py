# SPDX-License-Identifier: Apache-2.0
"""Dummy steps at start-up: measuring the activation peak and compiling every kernel once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.startup_phases import startup_phase
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

if TYPE_CHECKING:
    from vllm.v1.worker.model_runner import ModelRunner

#: tokens per warm-up prompt: one chunk of the gated delta rule, which is also its output tile
_CHUNK = 64
#: sequences that occupy every multiprocessor of any supported GPU
_MANY = 64


def profile_peak_bytes(runner: ModelRunner) -> int:
    """Device bytes in use at the worst step, without the arena (CUDA only).

    Runs the largest prefill against a two-page arena whose blocks are all null.
    """
    groups = get_kv_cache_groups(runner.vllm_config, runner.get_kv_cache_spec())
    runner.initialize_kv_cache(KVCacheConfig(0, [], groups, plan_arena(groups, num_pages=2)))
    torch.cuda.reset_peak_memory_stats(runner.device)
    resident = torch.cuda.memory_allocated(runner.device)
    _run_prefill(runner, _prefill_lengths(runner), SamplingParams(temperature=0.0, max_tokens=2))
    runner.sample_dummy()
    torch.cuda.synchronize(runner.device)
    peak_activations = torch.cuda.max_memory_allocated(runner.device) - resident
    runner.release_kv_cache()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    return total - free + peak_activations


def warm_up(runner: ModelRunner) -> None:
    """Compile every kernel by running it on its shapes; capture the graphs.

    Kernels differ by tile, and tiles follow from whether few or many sequences share the device
    and from whether queries are long or short, so each combination runs once. CUDA only.
    """
    if runner.device.type != "cuda":
        return
    longest = _longest(runner)
    many = min(runner.max_rows, _MANY)
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    filtered = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=0, max_tokens=2)
    for params, lengths in (
        (greedy, [min(_CHUNK, longest)]),
        (filtered, [min(2, longest)]),
        (greedy, [max(1, min(_CHUNK, runner.max_tokens // many, longest))] * many),
        (filtered, [1] * min(many, runner.max_tokens)),
    ):
        _run_prefill(runner, lengths[: runner.max_tokens], params, then_decode=True)
    with startup_phase("graph capture"):
        runner.capture_graphs()
        torch.cuda.synchronize(runner.device)


def _longest(runner: ModelRunner) -> int:
    return min(runner.max_tokens, runner.model_config.max_model_len - 1)


def _prefill_lengths(runner: ModelRunner) -> list[int]:
    longest = _longest(runner)
    count = max(1, min(runner.max_tokens // longest, runner.max_rows))
    return [longest] * count


def _run_prefill(
    runner: ModelRunner, lengths: list[int], params: SamplingParams, then_decode: bool = False
) -> None:
    """Steps of made-up requests whose every block is null; nothing they write is ever read."""
    requests = [
        NewRequestData(
            req_id=f"warm-up-{i}",
            prompt_token_ids=[1] * length,
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            block_ids=tuple(
                [0] * (-(-(length + 1) // table.block_size) if not table.recurrent else 1)
                for table in runner.block_tables.groups
            ),
            num_computed_tokens=0,
        )
        for i, length in enumerate(lengths)
    ]
    req_ids = [r.req_id for r in requests]
    scheduled = dict(zip(req_ids, lengths, strict=True))
    runner.execute_dummy(
        SchedulerOutput(
            requests,
            CachedRequestData.make_empty(),
            scheduled,
            sum(lengths),
            sampling_req_ids=set(req_ids),
        )
    )
    if then_decode:
        cached = CachedRequestData(
            req_ids=req_ids,
            new_block_ids=[None] * len(req_ids),
            num_computed_tokens=lengths,
            num_output_tokens=[1] * len(req_ids),
        )
        runner.execute_dummy(
            SchedulerOutput(
                [],
                cached,
                dict.fromkeys(req_ids, 1),
                len(req_ids),
                sampling_req_ids=set(req_ids),
            )
        )
    finished = SchedulerOutput.make_empty()
    finished.finished_req_ids = set(req_ids)
    runner.forget(finished)
