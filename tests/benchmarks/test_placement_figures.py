# SPDX-License-Identifier: Apache-2.0
"""The benchmark of placements measures what it says, and adds layers up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apriel2_models
import pytest
import torch

from benchmarks import placements
from benchmarks.placement_tables import MIXERS, Measured, by_parts, rows
from benchmarks.placements import Decodes, spread
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.worker import Worker

POINTS = ((1, 200), (3, 300))


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = apriel2_models.save(tmp_path, apriel2_models.stochastic(4), {})
    own = {"model": str(model), "kv_cache_memory_bytes": 1 << 22, "placement": "all-kda"}
    engine = LLM(**(placements.settings(POINTS) | own))
    yield engine
    engine.llm_engine.engine_core.shutdown()


def test_every_placement_is_measured_at_every_point(llm: LLM) -> None:
    chosen = {"all-gdn": "all-gdn", "mix": spread((2, 1, 1, 0))}
    found = [
        one
        for name, placement in chosen.items()
        for one in placements.measure(llm, name, placement, POINTS, "H200")
    ]
    assert [(one.placement, one.batch, one.context) for one in found] == [
        (name, *point) for name in chosen for point in POINTS
    ]
    assert found[0].layers == {"gdn": 4}
    assert found[2].layers == {"attention": 2, "sliding_window": 1, "kda": 1}
    assert all(one.ms > one.explain_ms > 0 for one in found)
    # Nothing is left in the worker: requests run as ever.
    assert len(llm.generate([{"prompt_token_ids": [1, 2, 3]}])) == 1


def test_steps_are_those_of_the_requests(llm: LLM) -> None:
    """Each has blocks of its own, reads all its context and adds a token a step."""
    llm.change_placement("all-attention")

    def look(worker: Worker) -> tuple[list[int], list[tuple[list[int], ...]], int]:
        runner = worker.model_runner
        decodes = Decodes(runner, 3, 100, 200)
        blocks = [new.block_ids for new in decodes._new]
        decodes.run()
        computed = [state.num_computed_tokens for state in runner.batch.requests.values()]
        decodes.close()
        return computed, blocks, len(runner.batch.requests)

    ((computed, blocks, left),) = llm.collective_rpc(look)
    assert computed == [100 + 8 + 2 * 16] * 3 and not left
    taken = Counter(block for (ids,) in blocks for block in ids)
    assert len(taken) == 3 * -(-200 // 16) == taken.total() and 0 not in taken


def test_requests_that_do_not_fit_are_refused(llm: LLM) -> None:
    llm.change_placement("all-attention")
    with pytest.raises(ValueError, match="3 requests of 5000 tokens need .* pages, but there are"):
        llm.collective_rpc(lambda worker: Decodes(worker.model_runner, 3, 100, 5000))
    with pytest.raises(VLLMValidationError, match="it names 48 layers"):
        layers = spread(placements.MIXTURES["a12_g1_k11"])
        placements.measure(llm, "a12_g1_k11", layers, POINTS, "H200")


def test_memory_is_full_of_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "_RANDOM_BYTES", 64)
    memory = torch.full((200,), 255, dtype=torch.uint8)
    placements.fill(memory)
    for dtype in (torch.bfloat16, torch.float32):
        numbers = memory.view(dtype)
        assert bool((numbers > 0).all() and (numbers < 1).all())
    assert len(set(memory[:64].tolist())) > 8
    assert torch.equal(memory[:64], memory[128:192])


@pytest.mark.parametrize("name", placements.MIXTURES)
def test_mixtures_have_the_layers_of_the_model(name: str) -> None:
    counts = placements.MIXTURES[name]
    layers = spread(counts)
    assert Counter(layers) == {m: n for m, n in zip(MIXERS, counts, strict=True) if n}
    assert len(layers) == 48
    for mixer, number in zip(MIXERS, counts, strict=True):
        for half in (layers[:24], layers[24:]):
            assert abs(half.count(mixer) - number / 2) <= 1


def test_layers_add_up() -> None:
    attention = Measured("all-attention", {"attention": 4}, 2, 8, 10.0, 8.0)
    kda = Measured("all-kda", {"kda": 4}, 2, 8, 6.0, 8.0)
    elsewhere = Measured("all-kda", {"kda": 4}, 1, 8, 1.0, 8.0)
    mix = Measured("Reg Lklhd-26", {"attention": 1, "kda": 3}, 2, 8, 7.7, 3.5)
    found = [attention, kda, mix]
    assert by_parts(mix, [elsewhere, *found]) == pytest.approx(7.0)
    assert by_parts(kda, found) == 6.0
    head, _, first, _, last = rows([vars(one) for one in found]).splitlines()
    assert head.endswith("| 2 × 8 | speed at 2 × 8 | published at 16K |")
    assert first == "| all-attention | 10.00 ms (1.25) | 1.00 × | 1.0 × |"
    assert last == "| Reg Lklhd-26, 1/0/3/0 | 7.70 ms (1.10, 2.20) | 1.30 × | 1.5 × |"
