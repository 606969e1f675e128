# SPDX-License-Identifier: Apache-2.0
"""A GPU has the weights of the mixers that placements in use have, pinned memory the others'."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.in_process import worker_of
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.host_weights import bytes_on_host, is_on_host, parameter_bytes
from vllm.model_executor.placements import Placement
from vllm.v1.worker.mixer_weights import MixerWeights

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LAYERS = 4
#: the dimensions of Super Apriel 15B: a layer's mixers take 100 to 140 MB each
LARGE: dict[str, Any] = {
    "model": str(ROOT / "benchmarks" / "super_apriel_15b"),
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "hf_overrides": {"decoder": {"num_blocks": LAYERS}},
}
TRAINED: dict[str, Any] = {"model": str(ROOT / "examples" / "models" / "tiny-apriel2-supernet")}
ARENA_BYTES = 256 << 20
#: driver's and kernels' own tensors, batch, graphs and journals of four rows
SLACK_BYTES = 256 << 20
#: what engines before the newest have left: workspaces of their streams
BEFORE = [0]
#: of the mixers of one placement: one of four layers
PART_BYTES = 128 << 20
CHANGES = ("all-kda", "kda,gdn,attention,kda", "all-attention")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made: list[LLM] = []

    def start(placement: str = "all-attention", **settings: Any) -> LLM:
        gc.collect()
        BEFORE[0] = torch.cuda.memory_allocated()
        given: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": ARENA_BYTES,
            "enable_sleep_mode": True,
        }
        made.append(LLM(**(given | settings), placement=placement))
        return made[-1]

    yield start
    for llm in made:
        llm.shutdown()


def outputs(llm: LLM, placement: str | None = None) -> list[Any]:
    params = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, placement=placement
    )
    prompts: Any = [{"prompt_token_ids": list(range(5 + i, 60 + 2 * i))} for i in range(3)]
    found = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in found]


def fresh(start: Any, placement: str, **settings: Any) -> list[Any]:
    llm = start(placement, **settings)
    found = outputs(llm)
    llm.shutdown()
    return found


def check_memory(llm: LLM, *placements: str) -> int:
    """The weights of these placements are on the device and others' pinned; returns the bytes of
    the former's mixers. Nothing else takes the memory that the latter leave."""
    worker = worker_of(llm)
    runner = worker.model_runner
    model = runner.supernet()
    unused = {id(mixer) for mixer in model.unused_mixers(*placements)}
    assert unused
    for mixer in model.get_mixers():
        for param in mixer.parameters():
            assert is_on_host(param) == (id(mixer) in unused) != param.is_cuda
            assert param.is_cuda or param.is_pinned()
    torch.cuda.synchronize()
    weights = sum(param.nbytes for param in runner.model.parameters() if param.is_cuda)
    beside = torch.cuda.memory_allocated() - weights - runner.arena.buffer.nbytes - BEFORE[0]
    assert 0 < beside < SLACK_BYTES
    mixers = model.get_mixers()
    return parameter_bytes(mixers) - bytes_on_host(mixers)


def graph_sizes(llm: LLM) -> list[int]:
    sizes: list[int] = worker_of(llm).model_runner.graphs.sizes
    return sizes


@pytest.mark.parametrize("eager", [False, True])
def test_bytes_and_tokens_of_every_placement(start: Any, eager: bool) -> None:
    """There and back twice, with graphs and without, also after sleep and a new load: tokens and
    logprobs are a fresh engine's."""
    settings = LARGE | {"enforce_eager": eager}
    expected = {one: fresh(start, one, **settings) for one in CHANGES}
    llm = start(**settings)
    sizes = graph_sizes(llm)
    assert bool(sizes) != eager
    taken = {"all-attention": check_memory(llm, "all-attention")}
    for placement in CHANGES * 2:
        llm.change_placement(placement)
        bytes_now = check_memory(llm, placement)
        assert taken.setdefault(placement, bytes_now) == bytes_now
        assert graph_sizes(llm) == sizes
        assert outputs(llm) == expected[placement]
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert outputs(llm) == expected["all-attention"]
    llm.collective_rpc("reload_weights")
    llm.change_placement("all-kda")
    check_memory(llm, "all-kda")
    assert outputs(llm) == expected["all-kda"]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_checkpoint_is_loaded_to_both(start: Any, quantization: str | None) -> None:
    settings = TRAINED | {"quantization": quantization}
    expected = {one: fresh(start, one, **settings) for one in CHANGES}
    llm = start(placement_alias={"mixed": CHANGES[1]}, **settings)
    check_memory(llm, "all-attention", CHANGES[1])
    for placement in CHANGES * 2:
        llm.change_placement(placement)
        check_memory(llm, placement, CHANGES[1])
        assert outputs(llm) == expected[placement]
        assert outputs(llm, "mixed") == expected[CHANGES[1]]


def test_what_weights_leave_is_the_arenas(start: Any) -> None:
    """Of the share of the device that the engine may take."""
    share = (16 << 30) / torch.cuda.get_device_properties(0).total_memory
    share += 1 - torch.cuda.mem_get_info()[0] / torch.cuda.mem_get_info()[1]
    settings = LARGE | {"kv_cache_memory_bytes": None, "gpu_memory_utilization": share}
    llm = start("all-kda", **settings)
    runner = worker_of(llm).model_runner
    together = []
    for placement in ("all-kda", "all-attention", "all-kda", "all-attention"):
        llm.change_placement(placement)
        taken = check_memory(llm, placement) + runner.journal_bytes()
        together.append(taken + runner.arena.buffer.nbytes)
    assert max(together) - min(together) < 2 * runner.arena.plan.page_bytes + (64 << 20)
    found = outputs(llm)
    llm.shutdown()
    assert found == fresh(start, "all-attention", **LARGE)


def test_a_change_without_room_changes_nothing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights find room for a part of them."""
    llm = start(**LARGE)
    expected, sizes = outputs(llm), graph_sizes(llm)
    total, fetch = torch.cuda.get_device_properties(0).total_memory, MixerWeights.fetch

    def fetch_to_little(self: MixerWeights, placements: Sequence[Placement]) -> None:
        # What earlier engines have left is no room for the weights.
        gc.collect()
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_allocated() + PART_BYTES
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            fetch(self, placements)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    with monkeypatch.context() as patch:
        patch.setattr(MixerWeights, "fetch", fetch_to_little)
        with pytest.raises(RuntimeError, match="as before, for the change failed: OutOfMemory"):
            llm.change_placement("all-kda")
    check_memory(llm, "all-attention")
    assert graph_sizes(llm) == sizes and outputs(llm) == expected
    llm.change_placement("all-kda")
    found = outputs(llm)
    llm.shutdown()
    assert found == fresh(start, "all-kda", **LARGE)


def test_a_request_brings_what_finds_room(start: Any) -> None:
    """Beside an arena of given size there is room; beside one that takes all there is none."""
    # Graphs have launches of their own, and a placement that came with a request has no graphs.
    expected = fresh(start, "all-swa", **LARGE, enforce_eager=True)
    llm = start(**LARGE)
    assert outputs(llm, "all-swa") == expected
    check_memory(llm, "all-attention", "all-swa")
    llm.change_placement("all-attention")
    check_memory(llm, "all-attention")
    llm.shutdown()
    full = start(**LARGE | {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.8})
    with pytest.raises(VLLMValidationError, match="of its mixers' weights are in host memory"):
        outputs(full, "all-swa")
    check_memory(full, "all-attention")
