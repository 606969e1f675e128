# SPDX-License-Identifier: Apache-2.0
"""A process begins to use its device on a thread, and finds it in use."""

from __future__ import annotations

import pytest
import torch

from vllm.platforms.cuda import use_on_a_thread

pytestmark = pytest.mark.gpu


def test_a_thread_uses_the_device_and_leaves_nothing_on_it() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    launched: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        use_on_a_thread(device).join()
        torch.cuda.synchronize(device)
    launched += [event.name for event in profile.events()]
    assert torch.cuda.is_initialized() and len(launched) >= 4, launched
    # cuBLAS keeps its workspace, for every thread and stream.
    assert torch.cuda.memory_allocated(device) - before <= 64 * 2**20
