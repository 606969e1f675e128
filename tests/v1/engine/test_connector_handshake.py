# SPDX-License-Identifier: Apache-2.0
"""What workers' connectors tell at start-up reaches the scheduler's before the first step."""

from __future__ import annotations

import pytest

from tests.tiny_models import tiny_model
from vllm import LLM


def test_handshake_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    child = {
        "kv_connector": "Programmed",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.distributed.kv_transfer.programmed_connector",
        "kv_connector_extra_config": {"number": 5},
    }
    llm = LLM(
        str(tiny_model("llama")),
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=8 << 20,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [child]},
        },
    )
    try:
        core = llm.llm_engine.engine_core.engine_core
        [scheduler_side] = core.scheduler.connector._children
        assert {rank: told.number for rank, told in scheduler_side.handshakes.items()} == {0: 5}
    finally:
        llm.llm_engine.shutdown()
