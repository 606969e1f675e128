# SPDX-License-Identifier: Apache-2.0
"""Families of Mamba2 and attention, served: fp32 greedy tokens and captured streams are
transformers', whatever happens to a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity_checks import (
    MakeEngine,
    assert_equals_reference,
    core_in_this_process,
    generate,
    prompts,
)
from tiny_models import hf_residual_streams, tiny_model

from tests.extraction_options import extraction
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = [pytest.mark.parity, core_in_this_process]

FAMILIES = (
    *("nemotron_h", "nemotron_h_moe", "granite_h", "granite_h_dense", "falcon_h1", "bamba"),
)
NUM_TOKENS = 20


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_streams_are_those_of_transformers(
    family: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """In chunks beside each other's decodes, preempted, and a second time from the cache."""
    llm = make_engine(
        family,
        max_num_batched_tokens=19,
        enable_prefix_caching=True,
        **extraction(tmp_path, [0, 2, 4]),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, preempted = scheduler.schedule, 0

    def preempt_and_schedule() -> Any:
        nonlocal preempted
        if len(scheduler.running) > 1 and preempted < 3:
            scheduler._preempt_last()
            preempted += 1
        return schedule()

    scheduler.schedule = preempt_and_schedule
    for _ in range(2):
        outputs = generate(llm, prompts((1, 16, 65)), NUM_TOKENS)
        for output in outputs:
            assert_equals_reference(output, tiny_model(family), NUM_TOKENS)
    assert preempted == 3
    assert max(output.num_cached_tokens or 0 for output in outputs) >= 64
    assert outputs[-1].kv_transfer_params is not None
    path = outputs[-1].kv_transfer_params["hidden_states_path"]
    found = load_hidden_states(path)["hidden_states"]
    streams = hf_residual_streams(tiny_model(family), list(outputs[-1].prompt_token_ids or []))
    for i, layer in enumerate((0, 2, 4)):
        expected = streams[layer]
        difference = (found[: len(expected), i] - expected).abs().max()
        assert float(difference) < 5e-5 * float(expected.std())
