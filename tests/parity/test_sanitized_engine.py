# SPDX-License-Identifier: Apache-2.0
"""An engine with `--sanitize`: sound runs pass, and a mechanism broken on purpose is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from parity_checks import LAYOUT, MakeEngine, core_in_this_process, generate, prompts

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.kernels.step import PagedGroups
from vllm.v1.core.checkpoint_keeper import CheckpointKeeper
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, RecurrentManager
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.block_tables import GroupBlockTable
from vllm.v1.worker.sanitizer import Sanitizer, SanitizerError
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs

pytestmark = [pytest.mark.parity, core_in_this_process]


def _group(number: int, kind: str, layers: str) -> str:
    """A stage may find what it has no layers of."""
    named = layers if LAYOUT.pp == 1 else "(model.layers|of other pipeline stages).*"
    return rf"group {number} \({kind}: {named}\)"


ATTENTION = _group(1, "full_attention", "model.layers.3.self_attn.attn")
STATE = _group(0, "mamba", "model.layers.0.linear_attn to model.layers.2.linear_attn, 3 layers")

#: the first block of attention of the first request: page 2, three blocks each
FIRST = rf"request 0.*, {ATTENTION}, block 6"
UNWRITTEN = "is read, but nothing was written there"

Patch = pytest.MonkeyPatch


def sanitized(make_engine: MakeEngine, family: str = "qwen3_5", **settings: Any) -> LLM:
    return make_engine(family, sanitize=True, **{"max_num_batched_tokens": 64, **settings})


# ---- sound runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_sliding"])
def test_sound_runs_pass_and_change_nothing(
    family: str, async_scheduling: bool, make_engine: MakeEngine
) -> None:
    """Shared prefixes, turns, forks, and so little memory that requests are preempted."""
    settings = {"enable_prefix_caching": True, "async_scheduling": async_scheduling}
    # Both models have two heads of keys, so that of four ranks each has as many as of two.
    memory = 700_000 // min(LAYOUT.tp, 2)
    llm = sanitized(make_engine, family, kv_cache_memory_bytes=memory, **settings)
    assert any(d.what == "sanitizer" and d.chosen == "on" for d in llm.explain().decisions)
    preemptions = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_last
    scheduler._preempt_last = lambda: (preemptions.append(1), preempt())
    plain = make_engine(family, max_num_batched_tokens=64, **settings)
    shared, *tails = prompts((100, 30, 40, 50, 33, 64, 1))
    batch = [shared + tail for tail in tails]
    for _ in range(2):
        found, expected = generate(llm, batch), generate(plain, batch)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
        batch = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 7] for o in expected]
    assert preemptions
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=20)
    (forked,) = llm.generate(TokensPrompt(prompt_token_ids=shared), params, use_tqdm=False)
    assert len(forked.outputs) == 4


def test_off_costs_nothing(make_engine: MakeEngine, monkeypatch: Patch) -> None:
    monkeypatch.setenv("VLLM_SANITIZE", "0")
    assert _sanitizes(make_engine("qwen3_5")) == (False, False)


def test_the_environment_switches_it_on(make_engine: MakeEngine, monkeypatch: Patch) -> None:
    monkeypatch.setenv("VLLM_SANITIZE", "1")
    assert _sanitizes(make_engine("qwen3_5")) == (True, True)


def _sanitizes(llm: LLM) -> tuple[bool, bool]:
    """Whether the scheduler keeps a journal for it, and whether the worker reads it."""
    pages = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.pages
    worker = llm.collective_rpc(lambda worker: worker.model_runner.sanitizer is not None)[0]
    return pages.journal is not None, worker


# ---- broken on purpose ---------------------------------------------------------------------------


def skip_copies(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Arena, "copy_blocks", lambda self, copies: None)


def forget_copies(monkeypatch: Patch) -> None:
    """The scheduler never asks for the copies a request starts from."""
    monkeypatch.setattr(CheckpointKeeper, "start_from", lambda *_: None)


def share_the_checkpoint(monkeypatch: Patch) -> None:
    """A request continues in the checkpoint itself instead of a copy."""
    start_from = CheckpointKeeper.start_from

    def share(self: Any, request_id: str, sources: Any, num_tokens: int) -> None:
        for manager, source in zip(self._managers, sources, strict=True):
            if source is not None and isinstance(manager, RecurrentManager):
                manager.req_to_blocks[request_id][0] = source
                self._pool.touch([source])
        start_from(self, request_id, sources, num_tokens)

    monkeypatch.setattr(CheckpointKeeper, "start_from", share)


def _at_the_second_token(monkeypatch: Patch, spoil: Callable[[Any, Any], None]) -> None:
    """`spoil(pool, block)` the first block of attention of every request that decodes."""
    schedule_running = Scheduler._schedule_running

    def schedule_and_spoil(self: Any, step: Any) -> bool:
        enough = schedule_running(self, step)
        manager = self.kv_cache_manager
        (attention,) = [m for m in manager.managers if isinstance(m, FullAttentionManager)]
        for request in step.requests:
            if request.num_output_tokens == 2:
                spoil(manager.block_pool, attention.blocks_of(request.request_id)[0])
        return enough

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_and_spoil)


def free_too_early(monkeypatch: Patch) -> None:
    """Once a request decodes, its first block of attention is given back."""
    _at_the_second_token(monkeypatch, lambda pool, block: pool.free_blocks([block]))


def free_and_give_away(monkeypatch: Patch) -> None:
    """As `free_too_early`, and the block is taken again at once, by nobody."""

    def swap(pool: Any, block: Any) -> None:
        pool.free_blocks([block])
        pool.get_new_blocks([0, 1], [None, block])

    _at_the_second_token(monkeypatch, swap)


def wrong_slots(monkeypatch: Patch) -> None:
    """What `prepare` made is right; what the kernels are given lies one slot further."""
    check_inputs = Sanitizer.check_inputs

    def check_and_shift(self: Any, *args: Any) -> None:
        check_inputs(self, *args)
        for table in self._tables.groups:
            table.slots += 1

    monkeypatch.setattr(Sanitizer, "check_inputs", check_and_shift)


def _after_prepare(monkeypatch: Patch, change: Callable[[StepInputs, PagedGroups], None]) -> None:
    prepare = StepInputBuilder.prepare

    def prepare_and_change(
        self: Any, order: Any, inputs: StepInputs, groups: PagedGroups, *args: Any
    ) -> None:
        prepare(self, order, inputs, groups, *args)
        change(inputs, groups)

    monkeypatch.setattr(StepInputBuilder, "prepare", prepare_and_change)


def wrong_uploaded_slots(monkeypatch: Patch) -> None:
    def shift(inputs: StepInputs, groups: PagedGroups) -> None:
        for group in groups.groups:
            group.slots.add_(1)

    _after_prepare(monkeypatch, shift)


def shifted_table(monkeypatch: Patch) -> None:
    append_row = GroupBlockTable.append_row

    def append(self: Any, row: int, block_ids: list[int]) -> None:
        append_row(self, row, block_ids if self.spec.is_recurrent else [b + 1 for b in block_ids])

    monkeypatch.setattr(GroupBlockTable, "append_row", append)


def reads_one_token_too_many(monkeypatch: Patch) -> None:
    _after_prepare(monkeypatch, lambda inputs, groups: inputs.seq_lens.add_(1))


def writes_to_the_null_page(monkeypatch: Patch) -> None:
    gather = GroupBlockTable.gather

    def gather_and_write(self: Any, *args: Any) -> Any:
        for arena in arenas:
            arena.buffer[40] = 1
        return gather(self, *args)

    arenas: list[Arena] = []
    init = Arena.__init__

    def remember(self: Any, *args: Any) -> None:
        init(self, *args)
        arenas.append(self)

    monkeypatch.setattr(Arena, "__init__", remember)
    monkeypatch.setattr(GroupBlockTable, "gather", gather_and_write)


BREAKAGES: list[tuple[Callable[[Patch], None], bool, str]] = [
    (skip_copies, True, f"request 1.*, {STATE}.*the state after token 98: {UNWRITTEN}"),
    (forget_copies, True, f"request 1.*, {STATE}.*the state after token 98: {UNWRITTEN}"),
    (share_the_checkpoint, True, f"request 1.*, {STATE}.*to write, but it is a checkpoint's"),
    (free_too_early, False, f"{FIRST} .generation 1., tokens 0 to 15: was freed since"),
    (free_and_give_away, False, f"{FIRST} .generation 2., tokens 0 to 15: was freed and given"),
    (wrong_slots, False, f"{FIRST}.*token 0: was not written by the step"),
    (wrong_uploaded_slots, False, f"{FIRST}.*token 0: belongs in slot 96 but is written to 97"),
    (shifted_table, False, f"{FIRST}.*tokens 0 to 15: the block table .* names another block .7."),
    (reads_one_token_too_many, False, "request 0.*although nothing the request may read is"),
    (writes_to_the_null_page, False, "null page was written to in a step of requests 0"),
]


@pytest.mark.parametrize(
    ("breakage", "caching", "message"), BREAKAGES, ids=[b[0].__name__ for b in BREAKAGES]
)
def test_a_broken_mechanism_is_named(
    breakage: Callable[[Patch], None],
    caching: bool,
    message: str,
    make_engine: MakeEngine,
    monkeypatch: Patch,
) -> None:
    breakage(monkeypatch)
    llm = sanitized(make_engine, enable_prefix_caching=caching, enforce_eager=True)
    (prompt,) = prompts((100,))
    with pytest.raises(SanitizerError, match=message):
        generate(llm, [prompt], max_tokens=12)
        generate(llm, [[*prompt, 5, 6, 7]], max_tokens=12)
