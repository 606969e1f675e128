# SPDX-License-Identifier: Apache-2.0
"""`vllm graph-check` on GPUs: waits, memory from the driver and empty graphs are caught; the tree
is clean on every visible GPU."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from vllm.compilation.graph_safety.device.allocations import allocations_noted
from vllm.compilation.graph_safety.device.checks import check_devices
from vllm.compilation.graph_safety.device.run import empty_graphs_raise
from vllm.compilation.graph_safety.device.sync_trap import (
    CurrentStream,
    torch_waits_raise,
    waits_trapped,
)
from vllm.engine.arg_utils import EngineArgs

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_torch_waits_are_errors_inside_the_block_only() -> None:
    x = torch.ones(1, device=DEVICE)
    with torch_waits_raise(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        x.item()
    assert x.item() == 1


def test_a_hidden_wait_is_found_where_it_is() -> None:
    """`Stream.synchronize` is none of torch's ops."""
    with waits_trapped(CurrentStream()) as waits:
        torch.cuda.current_stream().synchronize()
    assert waits.spot is not None
    lines, first = inspect.getsourcelines(test_a_hidden_wait_is_found_where_it_is)
    assert waits.spot.path == __file__
    assert first <= waits.spot.finding(14, "").line < first + len(lines)


def test_a_launch_does_not_wait() -> None:
    x = torch.ones(8, device=DEVICE)
    x.add_(1)
    with waits_trapped(CurrentStream()) as waits:
        x.add_(1)
    assert waits.spot is None
    torch.cuda.synchronize()


def test_memory_from_the_driver_is_found() -> None:
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    with allocations_noted(DEVICE) as none:
        kept.zero_()
    assert none == []
    torch.cuda.empty_cache()
    # More than torch has at hand: of segments of which tests before this one use a part.
    at_hand = torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE)
    with allocations_noted(DEVICE) as found:
        large = torch.empty(at_hand + (1 << 28), dtype=torch.uint8, device=DEVICE)
    assert [(f.path, f.hazard) for f in found] == [(__file__, 6)]
    del large


def test_an_empty_graph_is_an_error() -> None:
    graph = torch.cuda.CUDAGraph()
    with empty_graphs_raise(), pytest.raises(UserWarning, match="empty"):
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(DEVICE)):
            pass


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_tree_is_clean_on_every_gpu(family: str, drafts: int) -> None:
    method = {"method": "replay", "acceptance": 0.6, "seed": 1, "num_speculative_tokens": drafts}
    args = EngineArgs(
        model=str(tiny_model(family, torch.bfloat16)),
        load_format="dummy",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        speculative_config=method if drafts else None,
    )
    own = replace(args, max_num_seqs=40, max_num_batched_tokens=256, max_model_len=1024)
    config = args.create_engine_config()
    report = check_devices(config, 512, own_sizes=own.create_engine_config())
    assert report.findings == ()
    assert (report.devices, report.steps) == (torch.cuda.device_count(), 512)
    assert "decodes of up to 40 requests" in report.done[-1]
