# SPDX-License-Identifier: Apache-2.0
"""One builder call per state group, for a step and for the padding that a graph records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.input_batch import InputBatch, StepOrder
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs
from vllm.v1.worker.step_metadata import StateGroup, StepMetadata

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
MAX_LEN = 64


class Built(AttentionMetadata):
    def __init__(self, common: CommonAttentionMetadata) -> None:
        self.common = common


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def build(self, common: CommonAttentionMetadata) -> Built:
        self.calls += 1
        return Built(common)


class Bench:
    """Two attention layers in one group and a recurrent one."""

    def __init__(self) -> None:
        attention = FullAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        recurrent = MambaSpec(block_size=MAX_LEN, shapes=((4, 64),), dtypes=(torch.float32,))
        specs = [KVCacheGroupSpec(["a", "b"], attention), KVCacheGroupSpec(["r"], recurrent)]
        config = KVCacheConfig(9, [], specs, plan_arena(specs, num_pages=9))
        self.batch = InputBatch(4)
        self.tables = BlockTables(config, 4, MAX_LEN, 64, CPU, 2)
        self.inputs = StepInputBuilder(4, 64, CPU, 2)
        self.builders = [Builder(), Builder()]
        groups: list[Any] = [
            StateGroup(spec.layer_names, spec.kv_cache_spec, builder)  # type: ignore[arg-type]
            for spec, builder in zip(specs, self.builders, strict=True)
        ]
        self.layers: dict[str, Any] = {}
        self.metadata = StepMetadata(groups, self.tables, self.layers, MAX_LEN)

    def add(self, req_id: str, known: int, computed: int, blocks: tuple[list[int], ...]) -> None:
        state = self.batch.add(req_id, list(range(known)), known, GREEDY, computed)
        self.tables.set_row(state.row, blocks)

    def prepare(self, order: StepOrder, inputs: StepInputs) -> None:
        """Rows have computed on the device what the host believes."""
        self.inputs.progress.computed[:] = torch.from_numpy(self.batch.num_computed)
        self.inputs.prepare(order, inputs, self.tables.paged)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.add("prompt", 20, 0, ([1, 2], [7]))
    bench.add("running", 17, 17, ([3, 4], [8]))
    return bench


def test_a_padded_step(bench: Bench) -> None:
    order = bench.batch.order({"prompt": 20, "running": 1}, {"prompt", "running"})
    inputs = bench.inputs.build(order, 24)
    context = bench.metadata.of_step(order, inputs)
    bench.prepare(order, inputs)
    assert context.no_compile_layers is bench.layers and context.num_tokens == 21
    assert [builder.calls for builder in bench.builders] == [1, 1]
    assert context.attn_metadata["a"] is context.attn_metadata["b"]
    common = context.attn_metadata["a"].common
    assert (common.num_reqs, common.num_decodes, common.num_tokens) == (2, 1, 21)
    assert (common.max_query_len, common.max_seq_len) == (20, 20)
    assert common.block_table.tolist() == [[3, 4], [1, 2]]
    assert common.prefill_block_table.tolist() == [[1, 2]]
    assert common.prefill_seq_lens.tolist() == [20]
    slots = [3 * 16 + 17 % 16 + 16, *range(16, 36), -1, -1, -1]
    assert common.slot_mapping.tolist() == slots
    assert context.slot_mapping["b"].tolist() == slots and "r" not in context.slot_mapping
    assert common.num_computed_tokens_cpu.tolist() == [17, 0]
    assert context.attn_metadata["r"].common.block_table[:, 0].tolist() == [8, 7]
    # As many rows as there may be decodes, since the graph that runs them serves other steps too.
    assert list(context.decode_blocks) == ["r"]
    assert context.decode_blocks["r"].tolist() == [8, -1, -1, -1]


def test_what_builders_staged_is_uploaded_with_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_at_flush: list[list[int]] = []
    monkeypatch.setattr(
        bench.tables, "flush", lambda: calls_at_flush.append([b.calls for b in bench.builders])
    )
    order = bench.batch.order({"prompt": 20, "running": 1}, {"prompt", "running"})
    bench.metadata.of_step(order, bench.inputs.build(order))
    bench.metadata.of_padding(bench.inputs.padding(8, 4)[1])
    assert calls_at_flush == [[1, 1], [2, 2]]


def test_an_eager_step_has_its_decodes_only(bench: Bench) -> None:
    order = bench.batch.order({"prompt": 20, "running": 1}, {"prompt", "running"})
    context = bench.metadata.of_step(order, bench.inputs.build(order))
    assert context.decode_blocks["r"].tolist() == [8]


def test_metadata_for_some_layers_only(bench: Bench) -> None:
    """The tables of the others are uploaded all the same: a graph reads them."""
    order = bench.batch.order({"running": 1}, {"running"})
    inputs = bench.inputs.build(order, 4, 4)
    context = bench.metadata.of_step(order, inputs, ["r"])
    assert bench.tables.groups[1].decodes.device[:4].tolist() == [8, -1, -1, -1]
    assert list(context.attn_metadata) == ["r"]
    assert [builder.calls for builder in bench.builders] == [0, 1]
    table = bench.tables.groups[0].staged.device
    assert table[0, :2].tolist() == [3, 4] and table[1:4, :2].eq(-1).all()
    assert bench.metadata.of_step(order, inputs, []).attn_metadata == {}


def test_padded_decodes(bench: Bench) -> None:
    order, inputs = bench.inputs.padding(3, 3)
    common = bench.metadata.of_padding(inputs).attn_metadata["a"].common
    bench.prepare(order, inputs)
    assert (common.num_reqs, common.num_decodes, common.num_tokens) == (3, 3, 3)
    assert (common.max_query_len, common.max_seq_len) == (1, MAX_LEN)
    assert common.seq_lens.tolist() == [0, 0, 0] and common.slot_mapping.tolist() == [-1] * 3
    assert common.query_start_loc.tolist() == [0, 1, 2, 3]
    # Every block that a request may ever have is part of what the graph reads.
    assert common.block_table.shape == (3, MAX_LEN // 16 + 1) and common.block_table.eq(-1).all()


def test_padded_decodes_that_verify_drafts(bench: Bench) -> None:
    bench.inputs = StepInputBuilder(4, 64, CPU, 2, width=3)
    order, inputs = bench.inputs.padding(6, 2, width=3)
    context = bench.metadata.of_padding(inputs)
    bench.prepare(order, inputs)
    common = context.attn_metadata["a"].common
    assert (common.num_decodes, common.decode_width, common.num_tokens) == (2, 3, 6)
    assert common.num_decode_tokens == 6 and common.max_query_len == context.decode_width == 3
    assert common.query_start_loc.tolist() == [0, 3, 6]
    assert common.slot_mapping.tolist() == [-1] * 6
    assert context.decode_blocks["r"].tolist() == [-1, -1]


def test_padding_without_requests(bench: Bench) -> None:
    """What breaks see while pieces are captured: nothing to do."""
    order, inputs = bench.inputs.padding(5, 0)
    context = bench.metadata.of_padding(inputs)
    bench.prepare(order, inputs)
    common = context.attn_metadata["a"].common
    assert common.num_reqs == common.num_decodes == common.num_tokens == context.num_tokens == 0
    assert common.slot_mapping.tolist() == [-1] * 5 and len(inputs.input_ids) == 5
    assert context.decode_blocks["r"].tolist() == [-1] * 4
    assert np.array_equal(common.prefill_query_start_loc_cpu, [0])
