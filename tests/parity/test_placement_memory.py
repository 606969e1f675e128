# SPDX-License-Identifier: Apache-2.0
"""A change of placement stays within the memory of the start: arena and journals together.

Journals, which recurrent layers of GPUs keep, are switched on here; without them a placement takes
nothing beside its pages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apriel2_models import make_tensors, save, stochastic
from parity_checks import in_this_process, prompts

from tests.parity.in_process import runner_of
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.worker.journal_pool import JournalCounts, JournalPool
from vllm.v1.worker.model_runner import ModelRunner

pytestmark = [pytest.mark.parity, in_this_process]

LAYERS, MEMORY = 2, 2**22
PROMPTS = prompts((3, 20))
CHANGES = ("all-kda", "attention,gdn", "all-gdn", "kda,gdn", "all-attention")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = stochastic(LAYERS)
    return save(tmp_path_factory.mktemp("apriel2"), decoder, make_tensors(decoder))


@pytest.fixture
def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts engines that keep journals."""
    monkeypatch.setattr(type(current_platform), "defers_commit", True)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made: list[LLM] = []

    def start(**settings: Any) -> LLM:
        given: dict[str, Any] = {
            "max_model_len": 128,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": MEMORY,
        }
        made.append(LLM(**(given | settings), model=str(path), dtype="float32"))
        return made[-1]

    yield start
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def journal_bytes(runner: ModelRunner) -> int:
    """Of all placements, counting what they share once."""
    kept = (placed.journals for placed in runner.placed.values())
    tensors = [tensor for one in kept if one is not None for tensor in one.tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_bytes(llm: LLM) -> int:
    runner = runner_of(llm)
    return runner.arena.buffer.nbytes + journal_bytes(runner)


def generate(llm: LLM, placement: str | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, placement=placement)
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(batch, params, use_tqdm=False)]


def test_a_change_stays_within_the_memory_of_the_start(start: Any) -> None:
    """Journals of the new placement come out of the arena's bytes, and go back to them."""
    llm = start()
    most = MEMORY + journal_bytes(runner_of(llm))
    pages = {"all-attention": runner_of(llm).arena.plan.num_pages}
    taken = []
    for placement in CHANGES * 2:
        llm.change_placement(placement)
        runner = runner_of(llm)
        taken.append(journal_bytes(runner))
        assert most - runner.arena.plan.page_bytes < state_bytes(llm) <= most
        assert pages.setdefault(placement, runner.arena.plan.num_pages) == (
            runner.arena.plan.num_pages
        )
        generate(llm)
    assert taken[0] > MEMORY / 16 and taken[4] == 0


def test_the_old_memory_is_given_back_first(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the new placement's is allocated."""
    llm = start(placement="all-gdn")
    runner = runner_of(llm)
    old = [weakref.ref(tensor) for tensor in (runner.arena.buffer, *runner.journal_pool.tensors)]
    del runner
    reserve, alive = JournalPool.reserve, []

    def note(self: JournalPool, counts: JournalCounts) -> None:
        alive.append(sum(tensor() is not None for tensor in old))
        reserve(self, counts)

    monkeypatch.setattr(JournalPool, "reserve", note)
    llm.change_placement("all-kda")
    assert alive == [0]


def test_journals_that_leave_no_room_are_refused(start: Any) -> None:
    """By bytes, with the old placement serving on."""
    llm = start(kv_cache_memory_bytes=500_000)
    before, taken = generate(llm), state_bytes(llm)
    with pytest.raises(VLLMValidationError, match=r"take 491520 of the 500000 bytes"):
        llm.change_placement("all-kda")
    assert llm.collective_rpc("get_layer_placements") == [{0: "attention", 1: "attention"}]
    assert generate(llm) == before and state_bytes(llm) == taken
    llm.change_placement("attention,gdn")
    llm.change_placement("all-attention")
    assert generate(llm) == before and state_bytes(llm) == taken


def test_placements_share_their_journals(start: Any) -> None:
    """Requests that choose have those of the aliases; what has no alias and needs more goes without
    any, which is a decision, and its tokens are the same."""
    aliases = {"gdn": "all-gdn", "kda": "all-kda"}
    both = start(placement_alias=aliases)
    asked = ["all-gdn", "kda,gdn", "all-kda", "gdn,kda", "all-gdn", "attention,kda"]
    expected = [generate(both, placement) for placement in asked]
    one = start(placement_alias={"gdn": "all-gdn"})
    taken = state_bytes(one)
    assert [generate(one, placement) for placement in asked] == expected
    assert state_bytes(one) == taken == MEMORY + journal_bytes(runner_of(one))
    kept = {p.placement: p.journals is not None for p in runner_of(one).placed.values()}
    assert kept == {
        "attention,attention": False,
        "gdn,gdn": True,
        "kda,gdn": False,
        "kda,kda": False,
        "gdn,kda": False,
        "attention,kda": False,
    }
    noted = {one.what: one.chosen for one in one.llm_engine.vllm_config.decisions.decisions()}
    what = "deferred commit of a placement without an alias"
    assert noted[what].startswith("off for attention,kda"), "the log does not grow with them"
