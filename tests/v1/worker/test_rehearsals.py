# SPDX-License-Identifier: Apache-2.0
"""Which placements have something to rehearse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from apriel2_models import make_tensors, save, stochastic
from torch import nn

from vllm import LLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.worker import warm_up
from vllm.v1.worker.rehearsals import Rehearsals
from vllm.v1.worker.warm_up import DummyBatch, rehearse_if_new
from vllm.v1.worker.worker import Worker

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=32
)
SPECS: dict[str, KVCacheSpec] = {"a": FULL, "b": FULL, "w": WINDOW}


def mixer(name: str) -> nn.Module:
    """Those called b have biases, those called w another size."""
    return nn.Linear(4, 8 if name == "w" else 4, bias=name == "b")


def new_ones(placements: Sequence[str]) -> list[bool]:
    """Of placements of three layers, a letter per mixer; a dot is a layer that has one only."""
    rehearsals = Rehearsals()
    found = []
    for names in placements:
        mixers = {i: mixer(name) for i, name in enumerate(names) if name != "."}
        found.append(rehearsals.add({SPECS[name] for name in names if name != "."}, mixers))
    return found


@pytest.mark.parametrize(
    ("placements", "new"),
    [
        (["aaa", "aaa"], [True, False]),
        (["aaw", "waa", "aww", "awa", "waw"], [True, True, True, False, False]),
        # Each memory has other groups.
        (["aaa", "www", "aaw"], [True, True, True]),
        # Alike in state alone.
        (["aaa", "aba", "baa", "aaa"], [True, True, True, False]),
        # After a layer that is always the same.
        (["a.a", "a.a", ".aa", "a.a"], [True, False, True, False]),
        (["...", "..."], [True, False]),
    ],
)
def test_a_placement_is_new_if_a_mixer_or_its_predecessor_is(
    placements: list[str], new: list[bool]
) -> None:
    assert new_ones(placements) == new


def test_a_change_back_has_nothing_to_rehearse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    decoder = stochastic(2)
    path = save(tmp_path / "supernet", decoder, make_tensors(decoder))
    llm = LLM(str(path), max_model_len=64, kv_cache_memory_bytes=2**22, max_num_seqs=2)
    ran: list[DummyBatch] = []
    monkeypatch.setattr(warm_up, "run_batch", lambda runner, batch, **_: ran.append(batch))

    def rehearse(worker: Worker) -> None:
        rehearse_if_new(worker.model_runner)

    def batches_of(*names: str) -> int:
        llm.collective_rpc("set_layer_placements", args=(list(names),))
        before = len(ran)
        llm.collective_rpc(rehearse)
        return len(ran) - before

    try:
        placements: list[tuple[str, str]] = [
            ("attention", "gdn"), ("gdn", "gdn"), ("attention", "gdn"), ("gdn", "attention"),
            ("gdn", "gdn"),
        ]  # fmt: skip
        found: list[Any] = [batches_of(*names) for names in placements]
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert [count > 0 for count in found] == [True, True, False, True, False]
