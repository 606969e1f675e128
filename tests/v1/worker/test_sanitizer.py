# SPDX-License-Identifier: Apache-2.0
"""The sanitizer's checks one by one, on a small arena and hand-written steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.sched.output import (
    BlockCopy,
    BlocksFreed,
    BlocksTaken,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.input_batch import InputBatch, StepOrder
from vllm.v1.worker.sanitizer import Sanitizer, SanitizerError
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs

CPU = torch.device("cpu")
STATE, FULL, WINDOW, HIDDEN = range(4)
NUM_PAGES = 8


def config() -> KVCacheConfig:
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 24}
    specs = [
        MambaSpec(
            block_size=512,
            shapes=((3, 40), (4, 6, 160)),
            dtypes=(torch.bfloat16, torch.float32),
        ),
        FullAttentionSpec(**heads, dtype=torch.bfloat16),
        SlidingWindowSpec(**heads, dtype=torch.float32, sliding_window=20),
        HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=20, dtype=torch.float16),
    ]
    names = (["r0", "r1", "r2"], ["a0", "a1"], ["w0", "w1"], ["h"])
    groups = [KVCacheGroupSpec(n, spec) for n, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(0, [], groups, plan_arena(groups, NUM_PAGES))


class Bench:
    """What a runner does around its sanitizer; every request starts at `computed` tokens."""

    def __init__(self) -> None:
        self.config = config()
        self.arena = Arena(self.config, CPU)
        self.tables = BlockTables(self.config, 4, 128, 128, CPU, 2)
        self.batch = InputBatch(4)
        self.inputs = StepInputBuilder(4, 128, CPU, 2)
        self.sanitizer = Sanitizer(self.config, self.arena, self.tables, self.batch)
        self.log: list[Any] = []

    def first_of(self, page: int, group: int) -> int:
        return page * self.config.plan.groups[group].blocks_per_page

    def take(self, group: int, *block_ids: int, generation: int = 1) -> None:
        self.log.append(BlocksTaken(group, list(block_ids), [generation] * len(block_ids)))

    def begin(self, *requests: tuple[str, tuple[list[int], ...], int], **fields: Any) -> None:
        new = [
            NewRequestData(name, [1] * 64, [], SamplingParams(), None, ids, computed)
            for name, ids, computed in requests
        ]
        for data in new:
            state = self.batch.add(
                data.req_id, [1] * 64, 64, SamplingParams(), data.num_computed_tokens
            )
            self.tables.set_row(state.row, data.block_ids)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        output.block_log, self.log = self.log, []
        for name, value in fields.items():
            setattr(output, name, value)
        self.sanitizer.begin_step(output)

    def upload(self, **counts: int) -> tuple[StepOrder, StepInputs]:
        order = self.batch.order(counts, set(counts))
        inputs = self.inputs.build(order)
        for table in self.tables.groups:
            table.gather(order.rows, order.num_reqs, order.num_decodes)
        self.inputs.prepare(order, inputs, self.tables.paged)
        return order, inputs

    def write(self, group: int, row: int, positions: range, value: float = 1.0) -> None:
        """What the layers of a group do for these tokens."""
        table = self.tables.groups[group].table[row]
        for name in self.config.kv_cache_groups[group].layer_names:
            cache = self.arena.layers[name]
            if isinstance(cache, tuple):
                for part in cache:
                    part[table[0]] = value
                continue
            for position in positions:
                block = cache[int(table[position // 16])]
                (block[None] if group == HIDDEN else block)[:, position % 16] = value

    def run(self, skip: tuple[int, ...] = (), **counts: int) -> None:
        """A whole step in which only the groups in `skip` write nothing."""
        order, inputs = self.upload(**counts)
        self.sanitizer.check_inputs(order, inputs)
        for state, count in zip(order.states, order.num_scheduled.tolist(), strict=True):
            start = state.num_computed_tokens
            for group in {STATE, FULL, WINDOW, HIDDEN} - set(skip):
                self.write(group, state.row, range(start, start + count))
        self.end(order, inputs)
        self.batch.advance(order)

    def end(
        self, order: StepOrder, inputs: StepInputs, transfers: KVConnectorOutput | None = None
    ) -> None:
        self.sanitizer.observe(
            torch.zeros(inputs.num_tokens, 8), torch.zeros(len(order.sampling), 4)
        )
        self.sanitizer.end_step(order, inputs, transfers)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def blocks(bench: Bench, count: int = 2, page: int = 1) -> tuple[list[int], ...]:
    """Blocks of every group from page `page` on, one page per group, taken."""
    ids = tuple(
        [bench.first_of(page + g, g) + i for i in range(1 if g == STATE else count)]
        for g in range(4)
    )
    for g, own in enumerate(ids):
        bench.take(g, *own)
    return ids


# ---- sound steps ---------------------------------------------------------------------------------


def test_sound_steps_pass(bench: Bench) -> None:
    bench.begin(("a", blocks(bench), 0))
    bench.run(a=17)
    bench.begin()
    bench.run(a=1)


def test_free_blocks_are_nan_for_every_group(bench: Bench) -> None:
    ids = blocks(bench)
    bench.begin(("a", ids, 0))
    bench.run(a=17)
    for g, own in enumerate(ids):
        bench.log.append(BlocksFreed(g, own))
    bench.begin(finished_req_ids={"a"})
    for g, own in enumerate(ids):
        for name in bench.config.kv_cache_groups[g].layer_names:
            cache = bench.arena.layers[name]
            for part in cache if isinstance(cache, tuple) else (cache,):
                assert part[own].isnan().all()
    assert not bench.arena.buffer[: bench.config.plan.page_bytes].any()


def test_a_page_changes_groups(bench: Bench) -> None:
    first, others = bench.first_of(1, FULL), [bench.first_of(1, WINDOW)]
    bench.take(FULL, first)
    bench.log.append(BlocksFreed(FULL, [first]))
    bench.take(WINDOW, *others)
    bench.begin()


def test_copies_and_fills_happen_in_order(bench: Bench) -> None:
    source, target = bench.first_of(1, STATE), bench.first_of(2, STATE)
    bench.take(STATE, source)
    bench.begin()
    conv, state = bench.arena.layers["r1"]
    conv[source], state[source] = 3.0, 4.0
    bench.take(STATE, target)
    bench.log.append(BlockCopy(STATE, source, target))
    bench.log.append(BlocksFreed(STATE, [source]))
    bench.take(STATE, source, generation=2)
    bench.begin()
    assert (conv[target] == 3).all() and (state[target] == 4).all()
    assert state[source].isnan().all()


def test_what_slid_out_of_a_window_may_be_gone(bench: Bench) -> None:
    bench.begin(("a", blocks(bench, count=3), 0))
    bench.run(a=40)
    bench.log.append(BlocksFreed(WINDOW, [bench.first_of(1 + WINDOW, WINDOW)]))
    bench.begin()
    bench.run(a=1)


def test_memory_that_slept_is_new(bench: Bench) -> None:
    ids = blocks(bench)
    bench.begin(("a", ids, 0))
    for g, own in enumerate(ids):
        bench.log.append(BlocksFreed(g, own))
    bench.arena.buffer.zero_()
    bench.sanitizer.memory.reset()
    for g, own in enumerate(ids):
        bench.take(g, *own, generation=2)
    bench.batch.remove("a")
    bench.begin(finished_req_ids={"a"})


# ---- the scheduler's mistakes --------------------------------------------------------------------


@pytest.mark.parametrize("group", [FULL, WINDOW, HIDDEN])
def test_a_table_with_a_freed_block(bench: Bench, group: int) -> None:
    ids = blocks(bench)
    bench.begin(("a", ids, 0))
    bench.run(a=17)
    bench.log.append(BlocksFreed(group, ids[group][1:]))
    bench.begin()
    message = f"request a, group {group} .*block {ids[group][1]} .*tokens 16 to 31: was freed since"
    with pytest.raises(SanitizerError, match=message):
        bench.run(a=1)


def test_a_table_with_a_block_given_away(bench: Bench) -> None:
    ids = blocks(bench)
    bench.begin(("a", ids, 0))
    bench.log.append(BlocksFreed(STATE, ids[STATE]))
    bench.take(STATE, *ids[STATE], generation=2)
    bench.begin()
    message = r"request a, group 0 \(mamba: r0 to r2, 3 layers\).*generation 2.*given away"
    with pytest.raises(SanitizerError, match=message):
        bench.run(a=1)


@pytest.mark.parametrize("group", [STATE, FULL])
def test_two_writers(bench: Bench, group: int) -> None:
    first, second = blocks(bench), blocks(bench, page=4)
    second[group][:] = first[group]
    bench.begin(("a", first, 0))
    with pytest.raises(SanitizerError, match=f"request b, group {group} .*but it is request a's"):
        bench.begin(("b", second, 0))


def test_a_write_to_a_shared_block(bench: Bench) -> None:
    """`b` found the first block; computing its tokens again would write to it."""
    first, second = blocks(bench), blocks(bench, page=4)
    second[FULL][0], second[WINDOW][0] = first[FULL][0], first[WINDOW][0]
    bench.begin(("a", first, 0))
    bench.run(a=32)
    bench.batch.remove("a")
    bench.begin(("b", second, 16), kv_connector_metadata=object())
    bench.batch.num_computed[bench.batch.requests["b"].row] = 15
    message = f"request b, group {FULL} .*block {first[FULL][0]} .*shared or another's"
    with pytest.raises(SanitizerError, match=message):
        bench.run(b=1)


def test_a_copy_from_a_free_block(bench: Bench) -> None:
    bench.take(STATE, bench.first_of(1, STATE))
    bench.log.append(BlockCopy(STATE, bench.first_of(2, STATE), bench.first_of(1, STATE)))
    with pytest.raises(SanitizerError, match="copied from block 2 to 1 while it is free"):
        bench.begin()


def test_a_block_taken_twice(bench: Bench) -> None:
    bench.take(STATE, 2)
    bench.take(STATE, 2, generation=2)
    with pytest.raises(SanitizerError, match="although it is not free"):
        bench.begin()


@pytest.mark.parametrize(
    ("given", "problem"), [([], "given no such block"), ([0], "block 0 .*is the null block")]
)
def test_a_missing_block_and_a_null_block(bench: Bench, given: list[int], problem: str) -> None:
    ids = blocks(bench)
    bench.begin(("a", (ids[0], given, *ids[2:]), 0))
    with pytest.raises(SanitizerError, match=f"request a, group 1 .*{problem}"):
        bench.run(a=1)


# ---- the worker's mistakes -----------------------------------------------------------------------


def test_an_off_by_one_table(bench: Bench) -> None:
    ids = blocks(bench)
    bench.begin(("a", ids, 0))
    bench.tables.groups[FULL].table[0, :2] += 1
    named = ids[FULL][0] + 1
    with pytest.raises(SanitizerError, match=rf"group 1 .*names another block \({named}\)"):
        bench.run(a=17)


def test_wrong_slots(bench: Bench) -> None:
    bench.begin(("a", blocks(bench), 0))
    order, inputs = bench.upload(a=20)
    bench.tables.groups[HIDDEN].slots[17] += 1
    with pytest.raises(SanitizerError, match="request a, group 3 .*token 17: belongs in slot"):
        bench.sanitizer.check_inputs(order, inputs)


def test_a_padded_token_with_a_slot(bench: Bench) -> None:
    bench.begin(("a", blocks(bench), 0))
    bench.batch.num_computed[:] = 64
    order = bench.batch.order({"a": 1}, {"a"})
    bench.batch.num_computed[:] = order.num_computed[0] = 0
    inputs = bench.inputs.build(order, 3, 3)
    for table in bench.tables.groups:
        table.gather(order.rows, 3, order.num_decodes)
    bench.inputs.prepare(order, inputs, bench.tables.paged)
    bench.sanitizer.check_inputs(order, inputs)
    bench.tables.groups[FULL].slots[2] = 0
    with pytest.raises(SanitizerError, match="group 1 .*a padded token has a slot"):
        bench.sanitizer.check_inputs(order, inputs)
    bench.tables.groups[FULL].slots[2] = -1
    bench.tables.groups[STATE].staged.array[1, 0] = 0
    with pytest.raises(SanitizerError, match="group 0 .*a padded row has a block"):
        bench.sanitizer.check_inputs(order, inputs)


@pytest.mark.parametrize("group", [STATE, FULL, WINDOW, HIDDEN])
def test_a_slot_that_is_not_written(bench: Bench, group: int) -> None:
    bench.begin(("a", blocks(bench), 0))
    origin = "made of what nobody wrote, there or in a layer before"
    message = f"request a, group {group} .*was not written by the .*, or {origin}"
    with pytest.raises(SanitizerError, match=message):
        bench.run(skip=(group,), a=17)


@pytest.mark.parametrize("group", [STATE, FULL, WINDOW, HIDDEN])
def test_a_start_from_tokens_that_are_not_there(bench: Bench, group: int) -> None:
    """20 tokens were found, but one group's content was never copied."""
    bench.take(STATE, bench.first_of(6, STATE))
    bench.begin()
    for name in ("r0", "r1", "r2"):
        for part in bench.arena.layers[name]:
            part[6] = 0.0
    ids = blocks(bench)
    if group != STATE:
        bench.log.append(BlockCopy(STATE, 6, ids[STATE][0]))
    message = f"request a, group {group} .*token .*: is read, but nothing was written there"
    with pytest.raises(SanitizerError, match=message):
        bench.begin(("a", ids, 20))
        for g in {FULL, WINDOW, HIDDEN} - {group}:
            bench.write(g, 0, range(20))
        bench.run(a=1)


def test_loads_that_failed_are_the_connectors_business(bench: Bench) -> None:
    ids = blocks(bench)
    bench.begin(("a", ids, 20), kv_connector_metadata=object())
    order, inputs = bench.upload(a=1)
    bench.end(order, inputs, KVConnectorOutput(invalid_block_ids={ids[FULL][0]}))
    with pytest.raises(SanitizerError, match="request a"):
        bench.sanitizer._requests.undefined.clear()
        bench.end(order, inputs, KVConnectorOutput())


@pytest.mark.parametrize("touch", [0, -1])
def test_a_write_to_a_free_block(bench: Bench, touch: int) -> None:
    """Padding between blocks counts."""
    bench.take(STATE, 2)
    bench.log.append(BlocksFreed(STATE, [2]))
    bench.begin()
    page = bench.config.plan.page_bytes
    bench.arena.buffer[2 * page : 3 * page][touch] = 0
    bench.take(STATE, 2, generation=2)
    with pytest.raises(SanitizerError, match="block 2: was written to while it was free"):
        bench.begin()


def test_a_write_to_a_page_nobody_had(bench: Bench) -> None:
    bench.arena.buffer[3 * bench.config.plan.page_bytes + 5] = 1
    bench.take(STATE, 3)
    with pytest.raises(SanitizerError, match="page 3, given to group 0 .*written to before"):
        bench.begin()


def test_a_write_to_the_null_page(bench: Bench) -> None:
    bench.begin(("a", blocks(bench), 0))
    bench.arena.buffer[10] = 1
    with pytest.raises(SanitizerError, match="null page was written to in a step of requests a"):
        bench.run(a=1)
    bench.sanitizer.memory.clear_null_page()
    bench.run(a=1)


def test_nan_that_no_state_explains(bench: Bench) -> None:
    first, second = blocks(bench, count=1), blocks(bench, count=1, page=4)
    bench.begin(("a", first, 0), ("b", second, 0))
    order, inputs = bench.upload(a=2, b=3)
    for row, count in ((0, 2), (1, 3)):
        for group in (STATE, FULL, WINDOW, HIDDEN):
            bench.write(group, row, range(count))
    hidden = torch.zeros(5, 8)
    hidden[3, 5] = float("nan")
    bench.sanitizer.observe(hidden, torch.zeros(2, 4))
    with pytest.raises(SanitizerError, match="request b, tokens 0 to 2: hidden states or logits"):
        bench.sanitizer.end_step(order, inputs, None)
    logits = torch.zeros(2, 4)
    logits[0, 1] = float("nan")
    bench.sanitizer.observe(None, logits)
    with pytest.raises(SanitizerError, match="request a, tokens 0 to 1: hidden states or logits"):
        bench.sanitizer.end_step(order, inputs, None)


def test_nan_is_found_in_every_layer_and_part(bench: Bench) -> None:
    bench.begin(("a", blocks(bench), 0))
    bench.run(a=20)
    probe = bench.sanitizer._groups[FULL].probe
    block = int(bench.tables.groups[FULL].table[0, 1])
    where = np.array([block]), np.array([3])
    assert not probe.nan_tokens(*where).any()
    for layer in ("a0", "a1"):
        for half in (0, 1):
            cache = bench.arena.layers[layer]
            assert isinstance(cache, torch.Tensor)
            cache[block, half, 3, 1, 23] = float("nan")
            assert probe.nan_tokens(*where).all()
            assert not probe.nan_tokens(where[0], np.array([2])).any()
            assert probe.first_nan(block, 3) == (layer, False)
            cache[block, half, 3, 1, 23] = 0
