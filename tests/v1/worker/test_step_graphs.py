# SPDX-License-Identifier: Apache-2.0
"""Which steps replay which capture, in what order captures come, and what is planned."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.compilation.fake_graphs import Tape
from vllm import decisions
from vllm.config.compilation import (
    CUDAGraphMode,
    default_capture_sizes,
    default_piecewise_sizes,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.paged import PagedAttentionBackend
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.worker.graph_plan import (
    GraphPlan,
    full_graphs_forbidden,
    most_sequences,
    plan_graphs,
)
from vllm.v1.worker.graph_set import GraphSet, capture_order
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.step_graphs import Replay, StepGraphs


class _HostPlanned(PagedAttentionBackend):
    name = "HOST_PLANNED"
    supports_full_graph = False


class Steps:
    """Prepares steps that write `value + size` to their output."""

    def __init__(self, sizes: list[int], split: bool) -> None:
        self.tape = Tape()
        self.value = 0
        self.prepared: list[int] = []
        self.ran: list[int] = []
        self.brief = False
        self.ran_briefly: list[int] = []
        self.graphs = GraphSet(
            sizes, self.prepare, self.tape.new_graph, split=split, briefly=self.briefly
        )

    @contextmanager
    def briefly(self) -> Iterator[None]:
        self.brief = True
        yield
        self.brief = False

    def prepare(self, size: int) -> Callable[[], Tensor]:
        self.prepared.append(size)

        def run() -> Tensor:
            self.ran.append(size)
            if self.brief:
                self.ran_briefly.append(size)
            out = torch.zeros(size, 1)
            self.tape.launch(lambda: out.fill_(self.value + size))
            return out

        return run


def order(
    counts: list[int], num_decodes: int, sampling: int | None = None, width: int = 1
) -> StepShape:
    reqs = [str(i) for i in range(len(counts))]
    zeros = np.zeros(len(counts), dtype=np.int64)
    sampled = np.arange(len(counts) if sampling is None else sampling)
    counted = np.array(counts)
    step = StepOrder(reqs, [], zeros, counted, zeros, zeros, num_decodes, sampled, width=width)
    return step.shape


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (order([1], 1), Replay(1, True)),
        (order([1] * 3, 3), Replay(8, True)),
        (order([1] * 8, 8), Replay(8, True)),
        (order([1] * 9, 9), Replay(16, False)),
        (order([1] * 3, 3, sampling=2), Replay(4, False)),
        (order([1, 1, 7], 2), Replay(16, False)),
        (order([40, 24], 0), Replay(64, False)),
        (order([40, 25], 0), None),
    ],
)
def test_the_next_captured_size(step: StepShape, expected: Replay | None) -> None:
    decodes, pieces = Steps([1, 2, 8], split=False), Steps([4, 16, 64], split=True)
    graphs = StepGraphs({1: decodes.graphs}, {1: pieces.graphs})
    assert graphs.replay_for(step) is None
    graphs.capture_all()
    assert graphs.replay_for(step) == expected


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (3, True), (2, False)])
def test_steps_of_more_prefills_than_the_pieces_hold_are_eager(
    limit: int | None, fits: bool
) -> None:
    decodes, pieces = Steps([8], split=False), Steps([64], split=True)
    graphs = StepGraphs({1: decodes.graphs}, {1: pieces.graphs}, limit)
    graphs.capture_all()
    step = order([1, 1, 7, 2, 3], 2)
    assert graphs.replay_for(step) == (Replay(64, False) if fits else None)
    assert graphs.replay_for(order([1] * 5, 5)) == Replay(8, True)


def test_a_replay_runs_the_capture_of_its_size() -> None:
    decodes, pieces = Steps([1, 2], split=False), Steps([4], split=True)
    graphs = StepGraphs({1: decodes.graphs}, {1: pieces.graphs})
    graphs.capture_all()
    decodes.value, pieces.value = 10, 20
    with torch.inference_mode():
        assert graphs.replay(Replay(2, True)).tolist() == [[12]] * 2
        assert graphs.replay(Replay(1, True)).tolist() == [[11]]
        assert graphs.replay(Replay(4, False)).tolist() == [[24]] * 4


def test_only_what_is_captured_is_used() -> None:
    decodes, pieces = Steps([1, 2, 3, 6], split=False), Steps([8], split=True)
    graphs = StepGraphs({1: decodes.graphs}, {1: pieces.graphs})
    assert graphs.num_pending == 5
    seen = []
    while graphs.capture_next():
        seen.append((list(graphs.sizes), list(graphs.piecewise_sizes)))
    assert seen == [([6], []), ([6], [8]), ([2, 6], [8]), ([1, 2, 6], [8]), ([1, 2, 3, 6], [8])]
    assert graphs.num_pending == 0
    assert decodes.prepared == [6, 2, 1, 3]


def test_between_captures_steps_take_the_next_size_there_is() -> None:
    steps = Steps([1, 2, 4], split=False)
    graphs = StepGraphs({1: steps.graphs}, {1: Steps([], split=True).graphs})
    graphs.capture_next()
    assert graphs.replay_for(order([1], 1)) == Replay(4, True)
    graphs.capture_all()
    assert graphs.replay_for(order([1], 1)) == Replay(1, True)


def test_coarse_sizes_run_once_before_their_capture() -> None:
    steps = Steps([1, 2, 3, 4, 6], split=False)
    for size in capture_order([1, 2, 3, 4, 6]):
        steps.graphs.capture(size)
    assert steps.ran == [6, 6, 4, 4, 2, 2, 1, 1, 3]
    assert steps.ran_briefly == [6, 4, 2, 1], "what is captured is the whole step"


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_inside_a_capture(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And afterwards by itself only where it was before."""
    steps, seen = Steps([1, 2], split=False), []
    capture = steps.graphs.capture
    monkeypatch.setattr(
        steps.graphs, "capture", lambda size: (seen.append(gc.isenabled()), capture(size))
    )
    was_on = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        StepGraphs({1: steps.graphs}).capture_all()
        assert (seen, gc.isenabled()) == ([False, False], collects)
    finally:
        (gc.enable if was_on else gc.disable)()


def test_capture_order_serves_every_batch_early() -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 12, 20]
    ordered = capture_order(sizes)
    assert ordered == [20, 8, 4, 2, 1, 12, 7, 6, 5, 3]
    assert sorted(ordered) == sizes and capture_order([]) == []


def test_without_captures_everything_is_eager() -> None:
    graphs = StepGraphs()
    assert graphs.replay_for(order([1], 1)) is None and not graphs.capture_next()
    assert graphs.sizes == graphs.piecewise_sizes == []


def test_widths_have_graphs_of_their_own() -> None:
    narrow, wide = Steps([1, 4], split=False), Steps([1, 4], split=False)
    graphs = StepGraphs({1: narrow.graphs, 3: wide.graphs})
    graphs.capture_all()
    wide.value = 5
    assert graphs.replay_for(order([1, 1], 2)) == Replay(4, True)
    assert graphs.replay_for(order([3, 2], 2, width=3)) == Replay(4, True, 3)
    assert Replay(4, True, 3).num_tokens == 12 and Replay(4, False, 3).num_tokens == 4
    assert graphs.replay_for(order([2, 2], 2, width=2)) is None
    with torch.inference_mode():
        assert graphs.replay(Replay(4, True, 3)).tolist() == [[9]] * 4


# ---- planning ----------------------------------------------------------------------------------


def _config(
    mode: CUDAGraphMode,
    decode: list[int],
    pieces: list[int],
    given: bool = False,
    connector: str | None = None,
    widths: tuple[int, ...] = (1,),
) -> Any:
    transfer = None
    if connector is not None:
        transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config={})
    compilation = SimpleNamespace(
        cudagraph_mode=mode,
        decode_capture_sizes=decode,
        piecewise_capture_sizes=pieces,
        capture_sizes_given=given,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer, compilation_config=compilation, step_widths=widths
    )


def _memory(num_pages: int) -> KVCacheConfig:
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    recurrent = MambaSpec(block_size=64, shapes=((4, 64),), dtypes=(torch.float32,))
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["r"], recurrent)]
    return KVCacheConfig(num_pages, [], groups, plan_arena(groups, num_pages=num_pages))


_BACKENDS = [GDNAttentionBackend, PagedAttentionBackend]
_BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


def _decision(what: str) -> decisions.Decision | None:
    return next((d for d in decisions.decisions() if d.what == what), None)


@pytest.fixture(autouse=True)
def fresh_decisions() -> None:
    decisions.clear()


def test_every_mode_gets_its_sizes() -> None:
    memory = _memory(100)
    plan = plan_graphs(_config(_BOTH, [1, 8], [4, 16]), _BACKENDS, memory)
    most = GDNAttentionBackend.max_prefills_in_graph
    assert plan == GraphPlan([1, 8], [4, 16], most)
    only = plan_graphs(_config(CUDAGraphMode.PIECEWISE, [], [4]), _BACKENDS, memory)
    assert only == GraphPlan([], [4], most)
    paged = plan_graphs(_config(_BOTH, [1], [4]), [PagedAttentionBackend], memory)
    assert paged.max_prefills is None
    none = plan_graphs(_config(CUDAGraphMode.NONE, [], []), _BACKENDS, memory)
    assert none.sizes == [] and not decisions.decisions()


def test_widths_between_have_fewer_sizes() -> None:
    """Padding takes a fifth of the time of decodes at most, by the policy's costs, and a half
    beside prefills; the least and the largest width have every size."""
    decodes, pieces = default_capture_sizes(256), default_piecewise_sizes(2048)
    config = _config(_BOTH, decodes, pieces, widths=(1, 2, 4, 8))
    plan = plan_graphs(config, _BACKENDS, _memory(10_000))
    assert plan.widths == (1, 2, 4, 8)
    for width in (1, 8):
        assert plan.decode_sizes_of(width) == decodes and plan.piecewise_sizes_of(width) == pieces
    for width in (2, 4):
        for sizes, kept, tokens, most in (
            (decodes, plan.decode_sizes_of(width), width, 1.2),
            (pieces, plan.piecewise_sizes_of(width), 1, 1.5),
        ):
            assert len(kept) < len(sizes) and set(kept) < set(sizes) and kept == sorted(kept)
            for size in range(1, sizes[-1] + 1):
                least, padded = (next(s for s in of if s >= size) for of in (sizes, kept))
                if padded > least:
                    assert 1 + padded * tokens / 128 <= most * (1 + size * tokens / 128)
    counts = [len(plan.decode_sizes_of(width)) for width in plan.widths]
    assert counts == [27, 11, 15, 27] and len(plan.piecewise_sizes_of(2)) == 8


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_given_size_is_captured_for_every_width(width: int) -> None:
    plan = GraphPlan([4], [16], widths=(1, 2, 4))
    assert (plan.decode_sizes_of(width), plan.piecewise_sizes_of(width)) == ([4], [16])
    nothing = GraphPlan([], [], widths=(1, 2, 4))
    assert nothing.decode_sizes_of(width) == nothing.piecewise_sizes_of(width) == []


@pytest.mark.parametrize(
    ("mode", "pieces", "instead"),
    [(_BOTH, [4, 16], "PIECEWISE"), (CUDAGraphMode.FULL_DECODE_ONLY, [], "NONE")],
)
def test_backends_that_plan_on_the_host_forbid_whole_graphs(
    mode: CUDAGraphMode, pieces: list[int], instead: str
) -> None:
    plan = plan_graphs(_config(mode, [1, 8], pieces), [*_BACKENDS, _HostPlanned], _memory(100))
    assert plan == GraphPlan([], pieces, GDNAttentionBackend.max_prefills_in_graph)
    made = _decision("cudagraph_mode")
    assert made is not None and (made.chosen, made.instead_of) == (instead, mode.name)
    assert "HOST_PLANNED" in made.why


@pytest.mark.parametrize("per_layer", [False, True])
def test_connectors_that_act_on_layers_forbid_whole_graphs(
    per_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = SimpleNamespace(requires_piecewise_for_cudagraph=lambda extra: per_layer)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda config: chosen)
    config = _config(_BOTH, [1], [8], connector="Some")
    assert (full_graphs_forbidden(config, [PagedAttentionBackend]) is not None) is per_layer
    assert plan_graphs(config, _BACKENDS, _memory(100)).decode_sizes == ([] if per_layer else [1])


def test_sequences_are_counted_as_the_arena_gives_them_out() -> None:
    memory = _memory(9)
    share = [group.blocks_per_page for group in memory.plan.groups]
    most = most_sequences(memory, 1000)
    pages = lambda n: sum(-(-n // r) for r in share)  # noqa: E731
    assert 0 < most and pages(most) <= 8 < pages(most + 1)
    assert most_sequences(memory, 2) == 2


def test_default_sizes_end_at_what_the_memory_holds() -> None:
    memory = _memory(9)
    most = most_sequences(memory, 1000)
    plan = plan_graphs(_config(_BOTH, [1, 2, 500], [8]), _BACKENDS, memory)
    assert plan.decode_sizes == [*(s for s in (1, 2) if s < most), most]
    made = _decision("decode graphs")
    assert made is not None and str(most) in made.chosen and "500" in str(made.instead_of)


def test_sizes_that_were_asked_for_are_never_clamped() -> None:
    memory = _memory(9)
    most = most_sequences(memory, 1000)
    with pytest.raises(ValueError, match=f"500 requests, but the state memory holds {most}"):
        plan_graphs(_config(_BOTH, [1, 500], [8], given=True), _BACKENDS, memory)
    fits = plan_graphs(_config(_BOTH, [1, most], [8], given=True), _BACKENDS, memory)
    assert fits.decode_sizes == [1, most]
