# SPDX-License-Identifier: Apache-2.0
"""Steps of made-up requests do not run ahead of the device."""

from __future__ import annotations

import pytest

from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.warm_up import DummyBatch, run_batch


def test_each_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else warm-up would fill staged arrays whose copies are still queued."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(str(tiny_model("llama")), max_model_len=64, kv_cache_memory_bytes=2**22)
    waits: list[None] = []
    monkeypatch.setattr(type(current_platform), "synchronize", lambda self: waits.append(None))
    batch = DummyBatch(2, 3, 0, SamplingParams(temperature=0.0, max_tokens=2))
    llm.collective_rpc(lambda worker: run_batch(worker.model_runner, batch))
    # A prefill and a decode.
    assert len(waits) == 2
    llm.llm_engine.engine_core.shutdown()
