# SPDX-License-Identifier: Apache-2.0
"""Every graph that an engine would capture for the sizes it is configured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm.compilation.graph_safety.device.run import DeviceRun, empty_graphs_raise
from vllm.compilation.graph_safety.simulator.bounds import size_problems
from vllm.compilation.graph_safety.simulator.spots import spot_of_error
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.arena_sizing import pages_per_request
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.warm_up import warm_up


def capture_own_sizes(
    runner: ModelRunner,
    run: DeviceRun,
    memory_bytes: int,
    capture: Callable[[ModelRunner], None] = warm_up,
) -> None:
    """Capture what the runner's configuration asks for, and compare the sizes with its buffers; no
    step runs. The state memory is as large as the largest graph needs, or `memory_bytes`, and
    decides with the rest which sizes there are."""
    runner.initialize_kv_cache(_arena(runner, memory_bytes))
    try:
        with empty_graphs_raise():
            capture(runner)
            # Those that --ready-in would leave for later, too.
            runner.graphs.capture_all()
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, UserWarning) as error:
        message = f"capture failed on {runner.device}, at the sizes to serve with: {error}"
        run.findings.append(spot_of_error(error).finding(13, message))
        run.done.append("a capture at the sizes to serve with failed")
        return
    graphs = runner.graphs
    plan = GraphPlan(graphs.sizes, graphs.piecewise_sizes, None, runner.widths)
    problems = size_problems(runner, plan)
    run.findings += [one.spot.finding(one.hazard, one.message) for one in problems]
    run.done.append(
        f"at the sizes to serve with {graphs.num_captured} graphs captured: decodes of up to "
        f"{max(graphs.sizes, default=0)} requests, pieces of up to "
        f"{max(graphs.piecewise_sizes, default=0)} tokens"
    )


def _arena(runner: ModelRunner, memory_bytes: int) -> KVCacheConfig:
    """Pages for as many short requests as the largest graph of decodes has, or as there is memory
    for, and the null page. ValueError where there is none for a single request."""
    config = runner.vllm_config
    groups = get_kv_cache_groups(config, runner.get_kv_cache_spec())
    plan = plan_arena(groups, num_pages=1)
    most = max(config.compilation_config.decode_capture_sizes, default=1)
    needed = 1 + pages_per_request(groups, plan, 1, most, 1)
    pages = min(needed, memory_bytes // plan.page_bytes)
    if pages < 2:
        raise ValueError(
            f"{memory_bytes / 2**30:.2f} GiB are left for state, a page takes "
            f"{plan.page_bytes / 2**30:.2f}; raise --gpu-memory-utilization"
        )
    return KVCacheConfig(pages, [], groups, replace(plan, num_pages=pages))
