# SPDX-License-Identifier: Apache-2.0
"""Predicted decode steps: examples worked out by hand, and models against their own parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests import apriel2_models
from tests.tiny_models import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.decode_work import decode_work
from vllm.model_executor.model_outline import models_on_meta, outline_model
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.v1.core.decode_cost import (
    DEVICES,
    DeviceSpeed,
    ExpertsWork,
    PartWork,
    StateWork,
    device_speed,
    predict,
)
from vllm.v1.core.explain import Budget, explain
from vllm.v1.core.explain_decode import DecodeBatch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

#: 1 byte takes a microsecond, 1,000 FLOPs too, a kernel 2
SLOW = DeviceSpeed("slow", 1e6, 1e9, 2e-6)
HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
#: of attention, sliding windows, KDA and GDN, and decode speed beside all-attention at 32K and 16K
#: (arXiv 2604.19877)
PUBLISHED = {
    "Idealized All-18": ((13, 32, 1, 2), 1.99, 1.1),
    "Reg Lklhd-26": ((12, 26, 6, 4), 2.85, 1.5),
    "Reg Lklhd-18": ((3, 25, 4, 16), 4.76, 2.2),
    "Idealized All-6": ((0, 30, 5, 13), 6.13, 2.5),
    "Reg Lklhd-13": ((0, 16, 13, 19), 6.9, 2.7),
    "Reg Lklhd-10": ((0, 10, 5, 33), 10.69, 4.2),
}


# ---- by hand -------------------------------------------------------------------------------------


def test_the_slower_of_bytes_and_flops_counts_and_each_kernel() -> None:
    state = StateWork(fixed_bytes=3.0, fixed_flops=9e3)
    work = [
        PartWork("mixer", weight_bytes=100, flops=10_000, launches=3, states=(state,)),
        PartWork("mixer", weight_bytes=100, flops=10_000, launches=3, states=(state,)),
        PartWork("rest", weight_bytes=50, launches=1),
    ]
    few = predict(work, SLOW, batch=4, context=100)
    # Weights take 200 us of bytes and 80 of FLOPs, states 24 us and 72.
    assert [part.kind for part in few.parts] == ["mixer", "rest"]
    assert few.parts[0].seconds == pytest.approx((200 + 72 + 2 * 6) * 1e-6)
    assert few.seconds == pytest.approx((200 + 72 + 12 + 50 + 2) * 1e-6)
    assert (few.weight_bytes, few.state_bytes, few.launches) == (250, 24, 7)
    assert few.flops == 4 * (20_000 + 18_000) and few.bytes_per_token == (250 + 24) / 4
    many = predict(work, SLOW, batch=40, context=100)
    assert many.parts[0].seconds == pytest.approx((800 + 720 + 12) * 1e-6)


def test_rows_of_tokens_are_read_up_to_the_window() -> None:
    row = 2 * 2 * 8 * 2
    full = StateWork.of(FullAttentionSpec(**HEADS), 3.0, commit_interval=8)
    assert full.cost(1000) == (1001 * row, 1000 * row * 3.0)
    short = StateWork.of(SlidingWindowSpec(**HEADS, sliding_window=64), 3.0, 1)
    assert short.cost(1000) == (65 * row, 64 * row * 3.0)
    assert short.cost(10) == (11 * row, 10 * row * 3.0)


def test_a_recurrent_state_is_read_always_and_written_seldom() -> None:
    spec = MambaSpec(1000, shapes=((3, 8), (2, 16, 16)), dtypes=(torch.float32, torch.float32))
    size = spec.page_size_bytes
    assert size == 4 * (24 + 512)
    assert StateWork.of(spec, 2.0, commit_interval=8).cost(9)[0] == 2 * size
    assert StateWork.of(spec, 2.0, 1, journal_bytes=100).cost(10**6) == (2 * size, 2 * size)
    # Of 8 steps one writes the state, 7 leave a token, and they read 0 to 7 of them.
    moved = StateWork.of(spec, 2.0, 8, journal_bytes=100).cost(9)[0]
    assert moved == pytest.approx(size * 9 / 8 + 100 * 7 / 8 + 100 * 28 / 8)


def test_experts_are_read_if_some_token_chooses_them() -> None:
    experts = ExpertsWork(count=8, chosen=2, expert_bytes=10.0)
    assert experts.bytes(1) == pytest.approx(20)
    assert experts.bytes(2) == pytest.approx(80 * (1 - 0.75**2))
    assert experts.bytes(10_000) == pytest.approx(80)
    assert replace(experts, replicas=3).bytes(2) == pytest.approx(experts.bytes(6))


@pytest.mark.parametrize(("batch", "context"), [(0, 1), (1, 0)])
def test_a_step_of_nothing_is_refused(batch: int, context: int) -> None:
    with pytest.raises(ValueError, match="needs sequences and tokens"):
        predict([PartWork("x")], SLOW, batch, context)


def test_devices() -> None:
    assert device_speed("H100") is DEVICES["H100"]
    assert device_speed("1e12,2e14,3") == DeviceSpeed("given device", 1e12, 2e14, 3e-6)
    assert device_speed("1e12,2e14").launch_s == DEVICES["H200"].launch_s
    for text in ("H1000", "1e12", "1e12,-1", "1,2,3,4", "nan,1", "1,inf", "1,1,nan"):
        with pytest.raises(ValueError, match="expected one of A100, H100"):
            device_speed(text)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_tied", "qwen3_sliding"])
def test_every_parameter_is_read_but_the_embedding(family: str) -> None:
    config = EngineArgs(str(tiny_model(family)), max_model_len=256).create_engine_config()
    config, (model, *_) = models_on_meta(config)
    work = decode_work(config, model)
    tied = config.model_config.hf_config.tie_word_embeddings
    skipped = 0 if tied else model.get_submodule("model").embed_tokens.weight.nbytes
    assert sum(part.weight_bytes for part in work) == sum(p.nbytes for p in model.parameters()) - (
        skipped
    )
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "conv1d" not in name]
    assert sum(part.flops for part in work) == 2 * (
        sum(p.numel() for p in matrices) - skipped // matrices[0].element_size()
    )


def test_a_mixture_reads_what_its_tokens_choose() -> None:
    config = EngineArgs(str(tiny_model("mixtral")), max_model_len=256).create_engine_config()
    config, (model, *_) = models_on_meta(config)
    work = decode_work(config, model)
    kinds = {part.kind: part for part in work}
    (experts,) = kinds["experts and norms"].experts
    stack = [p for n, p in model.named_parameters() if "layers.0." in n and ".experts." in n]
    assert experts.expert_bytes * experts.count == sum(p.nbytes for p in stack)
    one, all_of_them = (predict(work, SLOW, n, 1).weight_bytes for n in (1, 10_000))
    left_out = sum(
        each.expert_bytes * (each.count - each.chosen) for part in work for each in part.experts
    )
    assert all_of_them - one == pytest.approx(left_out)


# ---- Super Apriel 15B ----------------------------------------------------------------------------

HIDDEN, MLP, VOCAB, WINDOW = 5120, 14336, 131072, 4096
NAMES = ("attention", "sliding_window", "kda", "gdn")
LABELS = ("attention", f"sliding window {WINDOW}", "recurrent (kda_attn)", "recurrent (gdn_attn)")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 15B's dimensions with one layer for each mixer."""
    attention = {"type": "attention", "heads": 32, "head_groups": 8, "head_size": 128}
    attention |= {"rotary": apriel2_models.ROTARY}
    taps = {"convolution_layer": {"kernel_size": 4}}
    gdn = {"type": "gdn", "value_heads": 32, "key_heads": 8, "key_head_dim": 128}
    mixers: dict[str, apriel2_models.Description] = {
        "attention": attention,
        "sliding_window": {**attention, "window_size": WINDOW},
        "gdn": {**gdn, "value_head_dim": 128, **taps},
        "kda": {"type": "kda", "heads": 32, "head_dim": 128, **taps},
    }
    decoder = apriel2_models.stochastic(4, mixers)
    decoder["block"]["mlp"]["intermediate_size"] = MLP
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "torch_dtype": "bfloat16"}
    sizes |= {"embeddings": {"max_position_embeddings": 65536}, "tie_word_embeddings": False}
    return apriel2_models.save(tmp_path_factory.mktemp("cut"), decoder, {}, **sizes)


@pytest.fixture(scope="module")
def parts(cut: Path) -> dict[str, PartWork]:
    """By mixer; `mlp` and `head` besides."""
    config = EngineArgs(str(cut), max_model_len=65536).create_engine_config()
    config, (model, *_) = models_on_meta(config)
    assert isinstance(model, HasPlacements)
    model.set_layer_placements(NAMES)
    found = {part.kind: part for part in decode_work(config, model)}
    renamed = dict(zip(LABELS, NAMES, strict=True))
    renamed |= {"feed-forward and norms": "mlp", "embedding and head": "head"}
    assert set(found) == set(renamed)
    return {renamed[kind]: part for kind, part in found.items()}


def test_parts_of_the_15b_by_hand(parts: dict[str, PartWork]) -> None:
    """Matrices in bf16; decays and the states of recurrent layers in fp32."""
    attention = HIDDEN * (4096 + 2 * 1024) + 4096 * HIDDEN
    gdn = HIDDEN * (10240 + 64) + 4096 * HIDDEN
    kda = HIDDEN * (3 * 4096 + 2 * 128 + 32) + 2 * 128 * 4096 + 4096 * HIDDEN
    for name, elements in {
        "attention": attention,
        "sliding_window": attention,
        "gdn": gdn,
        "kda": kda,
        "mlp": 3 * HIDDEN * MLP,
        "head": HIDDEN * VOCAB,
    }.items():
        assert parts[name].flops == 2 * elements
        assert parts[name].weight_bytes == pytest.approx(2 * elements, rel=2e-3)
    row = 2 * 8 * 128 * 2
    assert parts["attention"].states[0].cost(32768) == (32769 * row, 32768 * row / 2 * 2 * 4)
    assert parts["sliding_window"].states[0].cost(32768)[0] == (WINDOW + 1) * row
    # No journal on CPUs: read and written.
    matrix, taps = 32 * 128 * 128 * 4, 3 * 2
    assert parts["gdn"].states[0].cost(1)[0] == 2 * (matrix + taps * 6144)
    assert parts["kda"].states[0].cost(1)[0] == 2 * (matrix + taps * 3 * 4096)


def relative_speeds(
    parts: dict[str, PartWork], counts: tuple[int, ...], batch: int, context: int
) -> float:
    def seconds(counts: tuple[int, ...]) -> float:
        mixers = [parts[n] for n, k in zip(NAMES, counts, strict=True) for _ in range(k)]
        work = [*mixers, *[parts["mlp"]] * 48, parts["head"]]
        return predict(work, DEVICES["H100"], batch, context).seconds

    return seconds((48, 0, 0, 0)) / seconds(counts)


@pytest.mark.parametrize(("batch", "context"), [(64, 32768), (128, 32768), (32, 16384)])
def test_presets_are_ordered_as_measured(
    parts: dict[str, PartWork], batch: int, context: int
) -> None:
    speeds = [relative_speeds(parts, counts, batch, context) for counts, *_ in PUBLISHED.values()]
    assert all(slow < fast for slow, fast in pairwise(speeds))
    column = 1 if context == 32768 else 2
    for (name, published), speed in zip(PUBLISHED.items(), speeds, strict=True):
        ratio = speed / float(published[column])  # type: ignore[arg-type]
        # docs/apriel2.md states the deviations.
        assert 0.6 < ratio < 1.65, (name, ratio)


def test_layers_cost_as_published_in_this_order(parts: dict[str, PartWork]) -> None:
    """Attention 1, windows 0.48, KDA 0.21, GDN 0.14 of the whole layer."""
    speeds = [
        relative_speeds(parts, tuple(48 * (n == name) for n in NAMES), 32, 32768) for name in NAMES
    ]
    assert speeds[0] == 1 and speeds[0] < speeds[1] < speeds[2] < speeds[3]


# ---- the report ----------------------------------------------------------------------------------


def test_placements_of_a_supernet(cut: Path) -> None:
    args = EngineArgs(str(cut), max_model_len=65536, placement_alias=["mix=every2nd-gdn"])
    batch = DecodeBatch(8, DEVICES["H100"])
    report = explain(
        args.create_engine_config(),
        Budget(arena_bytes=20 * 10**9),
        [1000, 32768],
        what_ifs=False,
        decode_batch=batch,
    ).decode
    rows = {one.names: one for one in report.placements}
    own = ("the engine's", "all-attention")
    uniform = [("all-sliding_window",), ("all-gdn",), ("all-kda",)]
    assert list(rows) == [own, ("mix",), *uniform] and report.batch == batch
    assert rows[own].speedups == (1, 1)
    long = [rows[names].speedups[1] for names in (own, ("mix",), ("all-gdn",))]
    assert long[0] < long[1] < long[2]
    assert rows[("all-gdn",)].sequences[0] == rows[("all-gdn",)].sequences[1]
    row = 4 * 4096
    assert rows[own].sequences[1] == pytest.approx(20 * 10**9 / (row * 32768), rel=0.05)
    kinds = [part.kind for part in rows[("mix",)].costs[0].parts]
    assert kinds == ["feed-forward and norms", LABELS[0], LABELS[3], "embedding and head"]
    for placement, names in {"every2nd-gdn": ("mix",), "all-kda": ("all-kda",)}.items():
        alone = EngineArgs(str(cut), max_model_len=65536, placement=placement)
        weights = outline_model(alone.create_engine_config()).weight_bytes
        assert rows[names].weight_bytes == weights, placement
    assert len({row.weight_bytes for row in rows.values()}) == len(rows) - 1  # windows: attention's


def test_a_thinned_supernet_has_rows_for_mixers_that_all_layers_have(tmp_path: Path) -> None:
    path = apriel2_models.save(tmp_path, apriel2_models.thinned(), {})
    config = EngineArgs(str(path), max_model_len=256).create_engine_config()
    report = explain(config, Budget(arena_bytes=3 << 20), [12], what_ifs=False).decode
    assert [row.names for row in report.placements] == [("the engine's",), ("all-gdn",)]
    parts = [[part.kind for part in row.costs[0].parts] for row in report.placements]
    assert [LABELS[2] in kinds for kinds in parts] == [True, False]


def test_mixers_that_a_draft_model_does_not_use_are_in_host_memory(tmp_path: Path) -> None:
    path = str(apriel2_models.save(tmp_path, apriel2_models.stochastic(2), {}))
    drafter = {"method": "draft_model", "model": path, "num_speculative_tokens": 2}
    args = EngineArgs(path, max_model_len=256, placement="all-kda", speculative_config=drafter)
    config = args.create_engine_config()
    report = explain(config, Budget(arena_bytes=3 << 20), [12], what_ifs=False).decode
    assert report.placements[0].weight_bytes == outline_model(config).weight_bytes


def test_a_model_without_placements_has_one_row() -> None:
    config = EngineArgs(str(tiny_model("qwen3_5")), max_model_len=256).create_engine_config()
    report = explain(config, Budget(arena_bytes=3 << 20), [12], what_ifs=False).decode
    (row,) = report.placements
    assert row.names == () and row.speedups == () and row.sequences[0] > 0
    assert row.weight_bytes is None
    assert row.costs[0].batch == DecodeBatch().size and row.costs[0].context == 12
