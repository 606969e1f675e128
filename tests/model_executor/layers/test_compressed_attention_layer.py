# SPDX-License-Identifier: Apache-2.0
"""A layer of compressed attention against its equations, in any split into steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.harness import BLOCK_SIZE, make_config
from tests.model_executor.layers.compressed_steps import (
    SHAPES,
    LayerSteps,
    expected,
    hidden,
    make_layer,
)
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.kernels.cpu import CpuKernels
from vllm.model_executor.decode_work import decode_work
from vllm.platforms import current_platform
from vllm.testing.graph_safety import assert_graph_safe, assert_replays
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

pytestmark = pytest.mark.slow

RATIOS = list(SHAPES)
LENGTH = 270


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("llama"))
    with set_current_vllm_config(config):
        yield config


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("ratio", RATIOS)
def test_one_pass(ratio: int, config: VllmConfig) -> None:
    layer, x = make_layer(SHAPES[ratio]), hidden(LENGTH, SHAPES[ratio])
    out = LayerSteps(layer, config).step([(1, 0, LENGTH)], [x, x, x])
    close(out, expected(layer, x))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", range(2))
def test_random_chunks_and_batches(ratio: int, seed: int, config: VllmConfig) -> None:
    """Three sequences side by side: decodes, then prefills of any length."""
    layer, rng = make_layer(SHAPES[ratio]), random.Random(seed)
    streams = [hidden(LENGTH, SHAPES[ratio], seed=i) for i in range(3)]
    steps, done = LayerSteps(layer, config), [0, 0, 0]
    outs: list[list[Tensor]] = [[], [], []]
    while min(done) < LENGTH:
        todo = [seq for seq in range(3) if done[seq] < LENGTH and rng.random() < 0.8]
        sizes = {seq: rng.choice([1, 1, 2, 5, 40, 131]) for seq in todo}
        chunks = [(s, done[s], min(sizes[s], LENGTH - done[s])) for s in todo]
        chunks.sort(key=lambda chunk: not (chunk[1] > 0 and chunk[2] == 1))
        if not chunks:
            continue
        out = steps.step(chunks, streams, padding=rng.choice([0, 3]))
        for (seq, _, length), part in zip(
            chunks, out.split([length for _, _, length in chunks]), strict=True
        ):
            outs[seq].append(part)
            done[seq] += length
    for seq, stream in enumerate(streams):
        close(torch.cat(outs[seq]), expected(layer, stream))


@pytest.mark.parametrize("ratio", RATIOS)
def test_bits_depend_neither_on_the_cut_nor_on_the_batch(
    ratio: int, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the CPU's kernels, in steps of so few tokens that one of them does all products."""
    monkeypatch.setitem(vars(current_platform), "kernels", CpuKernels())
    layer, x = make_layer(SHAPES[ratio]), hidden(160, SHAPES[ratio])
    steps = LayerSteps(layer, config)
    single = torch.cat([steps.step([(0, t, 1)], [x]) for t in range(len(x))])
    steps = LayerSteps(layer, config)
    cut = [(0, 64), (64, 5), (69, 60), (129, 31)]
    assert torch.equal(torch.cat([steps.step([(0, *c)], [x]) for c in cut]), single)
    for seq, end in ((1, 40), (2, 25)):
        steps.step([(seq, 0, end)], [x] * 3)
    both = steps.step([(1, 40, 1), (2, 25, 1), (0, 0, 30)], [x] * 3)
    assert torch.equal(both, single[[40, 25, *range(30)]])


@pytest.mark.parametrize("ratio", RATIOS)
def test_shared_prefix(ratio: int, config: VllmConfig) -> None:
    """A second sequence continues from the first one's blocks: of what has a window only the last
    ones, and before them the null block."""
    layer, shared = make_layer(SHAPES[ratio]), 128
    x = hidden(LENGTH, SHAPES[ratio])
    other = torch.cat([x[:shared], hidden(LENGTH - shared, SHAPES[ratio], seed=5)])
    steps = LayerSteps(layer, config)
    steps.step([(0, 0, LENGTH)], [x])
    for name, table in steps.tables.items():
        spec = steps.specs[name]
        count = shared // spec.block_size
        skipped = 0 if spec.window is None else (shared - spec.window + 1) // spec.block_size
        table[1, :count] = table[0, :count]
        table[1, :skipped] = 0
    outs = [
        steps.step([(1, start, size)], [x, other])
        for start, size in [(128, 1), (129, 90), *((t, 1) for t in range(219, LENGTH))]
    ]
    close(torch.cat(outs), expected(layer, other[:LENGTH])[128:])


@pytest.mark.parametrize("ratio", RATIOS)
def test_rejected_drafts_leave_nothing(ratio: int, config: VllmConfig) -> None:
    """Four tokens are verified at once, and only some of them are what the sequence goes on with:
    what follows computes the others' places again."""
    layer, rng = make_layer(SHAPES[ratio]), random.Random(3)
    x = hidden(LENGTH, SHAPES[ratio])
    steps = LayerSteps(layer, config)
    outs = [steps.step([(1, 0, 120)], [x, x])]
    done = 120
    while done < LENGTH - 4:
        accepted = rng.randint(1, 4)
        drafted = x.clone()
        drafted[done + accepted :] = torch.randn(len(x) - done - accepted, x.shape[1])
        out = steps.step([(1, done, 4)], [x, drafted], width=4)
        outs.append(out[:accepted])
        done += accepted
    close(torch.cat(outs), expected(layer, x[:done]))


@pytest.mark.parametrize("ratio", RATIOS)
def test_ranks_add_up_to_the_whole_layer(ratio: int, config: VllmConfig) -> None:
    """Heads and groups are divided; every rank keeps the same rows."""
    whole, x = make_layer(SHAPES[ratio]), hidden(200, SHAPES[ratio])
    steps = LayerSteps(whole, config)
    out, parts = steps.step([(0, 0, 200)], [x]), []
    for rank in range(2):
        with as_rank(rank, 2):
            layer = make_layer(SHAPES[ratio])
        assert layer.num_heads == 2 and layer.num_groups == 1
        layer.wo_b.reduce_results = False
        for name, param in layer.named_parameters():
            loader = getattr(param, "weight_loader")  # noqa: B009
            loader(param, whole.get_parameter(name))
        own = LayerSteps(layer, config)
        parts.append(own.step([(0, 0, 200)], [x]))
        for name, cache in own.caches.items():
            expected_rows = steps.caches[name].kv_cache
            torch.testing.assert_close(cache.kv_cache, expected_rows, equal_nan=True)
    torch.testing.assert_close(sum(parts), out, rtol=1e-5, atol=1e-5)


def test_ranks_that_do_not_divide_it_are_refused(config: VllmConfig) -> None:
    with pytest.raises(ValueError, match="2 groups of the output cannot be divided among 4"):
        with as_rank(0, 4):
            make_layer(SHAPES[4])


def test_other_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match="compress ratio 8 is not supported; supported: 0"):
        replace(SHAPES[0], ratio=8)


@pytest.mark.parametrize("on_the_device", [True, False])
def test_a_float8_cache_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, on_the_device: bool
) -> None:
    """Another device would be of no help, so none is asked for."""
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", on_the_device)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ValueError, match="does not read a float8 cache; use --kv-cache-dtype auto"):
        make_layer(SHAPES[4])


def test_what_it_keeps(config: VllmConfig) -> None:
    """A window of rows, and per compressor a window of token rows and all entries."""
    rows = dict(block_size=BLOCK_SIZE, num_kv_heads=1, dtype=torch.float32)

    def specs(ratio: int) -> dict[str, KVCacheSpec]:
        return LayerSteps(make_layer(SHAPES[ratio]), config).specs

    window = SlidingWindowMLASpec(**rows, head_size=16, sliding_window=10)
    assert specs(0) == {"attn.tokens": window}
    assert specs(4) == {
        "attn.tokens": window,
        "attn.compressor.tokens": SlidingWindowMLASpec(**rows, head_size=64, sliding_window=8),
        "attn.compressor.entries": MLAAttentionSpec(**rows, head_size=16, compress_ratio=4),
        "attn.indexer.compressor.tokens": SlidingWindowMLASpec(
            **rows, head_size=48, sliding_window=8
        ),
        "attn.indexer.compressor.entries": MLAAttentionSpec(**rows, head_size=12, compress_ratio=4),
    }
    entries = replace(MLAAttentionSpec(**rows, head_size=16), block_size=128, compress_ratio=128)
    assert specs(128) == {
        "attn.tokens": window,
        "attn.compressor.tokens": SlidingWindowMLASpec(**rows, head_size=32, sliding_window=128),
        "attn.compressor.entries": entries,
    }


def test_what_a_decode_is_said_to_read(config: VllmConfig) -> None:
    """Of entries the chosen ones, of their keys all, and each token's row by one entry, or two."""
    layer = make_layer(SHAPES[4])
    parts = decode_work(config, nn.ModuleList([nn.ModuleDict({"attn": layer})]))
    (work,) = (part for part in parts if part.states)
    row, long = 4 * 16, 1000
    own, entries = (10 + 1) * row, (4 * 7 + 1) * row / 4
    keys = (long + 1) * 4 * 12 / 4
    left_behind = (2 + 1) * 4 * (4 * 16 + 4 * 12)
    assert sum(state.cost(long)[0] for state in work.states) == own + entries + keys + left_behind
    flops = sum(state.cost(long)[1] for state in work.states)
    products = 2 * 4 * (10 * 16 + 7 * 16) + 32 * 250 * 12 + 2 * (64 + 48)
    assert flops == pytest.approx(2 * products)


@pytest.mark.parametrize("ratio", RATIOS)
def test_graphs(ratio: int, config: VllmConfig) -> None:
    """Decodes captured at one position are replayed at all that follow, past every ratio."""
    layer, x = make_layer(SHAPES[ratio]), hidden(LENGTH, SHAPES[ratio])
    assert_graph_safe(layer)
    starts = [2, 90, 110, 240]
    steps = LayerSteps(layer, config, len(starts))
    for seq, start in enumerate(starts):
        steps.step([(seq, 0, start)], [x] * len(starts))

    def chunks(step: int) -> list[tuple[int, int, int]]:
        return [(seq, start + step, 1) for seq, start in enumerate(starts)]

    captured, _ = steps.context(chunks(0))

    def between(step: int) -> None:
        now, _ = steps.context(chunks(step))
        for name, slots in now.slot_mapping.items():
            captured.slot_mapping[name].copy_(slots)

    inputs = []
    for step in range(24):
        positions = torch.tensor([start for _, start, _ in chunks(step)])
        inputs.append((positions, x[positions]))
    with set_forward_context(captured), torch.inference_mode():
        assert_replays(layer, inputs[:8], split=True, between=between)
        assert_replays(layer, inputs, between=between)
        out = layer(*inputs[-1])
    close(out, expected(layer, x)[inputs[-1][0]])


def test_hooks_surround_every_cache(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector loads all of them before the first is touched."""
    calls = []
    layer, x = make_layer(SHAPES[4]), hidden(5, SHAPES[4])
    steps = LayerSteps(layer, config)

    def note(what: str, name: str) -> None:
        written = [n for n, c in steps.caches.items() if not c.kv_cache[1:].isnan().all()]
        calls.append((what, name, len(written)))

    connector = SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=partial(note, "wait"),
        save_kv_layer=lambda name, cache, metadata: note("save", name),
    )
    monkeypatch.setattr(kv_transfer_state.current_slot(), "connector", connector)
    steps.step([(0, 0, 5)], [x])
    names = list(steps.caches)
    assert sorted(name for what, name, written in calls[:5]) == sorted(names)
    assert all(what == "wait" and not written for what, _, written in calls[:5])
    assert sorted(name for what, name, written in calls[5:]) == sorted(names)
    assert all(what == "save" and written == 5 for what, _, written in calls[5:])
