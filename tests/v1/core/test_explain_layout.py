# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of layouts: beside engines, beside the model's own parameters, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extraction_options import extraction
from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_outline import models_on_meta
from vllm.v1.core.decode_cost import DEVICES
from vllm.v1.core.explain import Explanation, explain
from vllm.v1.core.explain_layout import (
    LayoutComparison,
    LayoutReport,
    Rates,
    compare_layouts,
    explain_layout,
)
from vllm.v1.core.layout_cost import Layout
from vllm.v1.core.layout_plan import Budget
from vllm.v1.core.link_speed import LINKS

MIB = 1 << 20
HYBRID = Path(__file__).parents[3] / "benchmarks" / "qwen3_5_4b"
DENSE, MIXTURE = (HYBRID.with_name(name) for name in ("qwen3_5_27b", "qwen3_5_35b_a3b"))
H200 = Budget(device_bytes=141 * 10**9, reserved_bytes=2 * 10**9)


def config_of(model: str | Path, **options: Any) -> Any:
    return EngineArgs(model=str(model), **options).create_engine_config()


def reported(model: str, layout: str, budget: Budget | None = None, **options: Any) -> LayoutReport:
    options = {"max_model_len": 256, "dtype": "bfloat16", **options}
    config = config_of(tiny_model(model), **options)
    budget = budget or Budget(arena_bytes=4 * MIB)
    return explain_layout(config, Layout.parse(layout), budget, Rates(), batch=8, context=100)


def compared(
    model: str | Path, devices: int, budget: Budget, context: int | None = None, **options: Any
) -> LayoutComparison:
    return compare_layouts(config_of(model, **options), devices, budget, Rates(), 8, context)


# ---- beside engines ------------------------------------------------------------------------------


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_an_engine_gets_the_pages_it_says(sizes: dict[str, int]) -> None:
    options: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", **sizes}
    options |= {"kv_cache_memory_bytes": 3 * MIB, "max_num_seqs": 8}
    path = tiny_model("qwen3_5")
    expected = explain(config_of(path, **options), lengths=[100], what_ifs=False)
    llm = LLM(str(path), **options)
    try:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == expected.num_pages
        live = llm.explain([100])
    finally:
        llm.shutdown()
    assert live.groups == expected.groups and live.requests[0].blocks == expected.requests[0].blocks
    assert live.memory.arena_bytes == expected.num_pages * expected.page_bytes
    assert live.layout is not None and expected.layout is not None
    told = expected.layout.report
    assert live.layout.report.stages == told.stages
    assert told.memory_source == "--kv-cache-memory-bytes"
    assert all(0 < stage.arena_bytes <= 3 * MIB for stage in told.stages)
    assert sum(stage.layers for stage in told.stages) == 4


# ---- bytes ---------------------------------------------------------------------------------------


def test_weights_are_divided() -> None:
    whole = reported("llama", "tp1").stages[0].weight_bytes
    ranks, stages = reported("llama", "tp2").stages, reported("llama", "pp2").stages
    # Norms and tables of rotations are whole on both, and the vocabulary is padded for them.
    assert len(ranks) == 1 and 0.5 <= ranks[0].weight_bytes / whole < 0.6
    # Embedding and head are on one stage each, those tables on both.
    _, (model, *_) = models_on_meta(config_of(tiny_model("llama"), max_model_len=256))
    tables = {id(one): one.nbytes for one in model.buffers()}
    assert sum(stage.weight_bytes for stage in stages) == whole + sum(tables.values())
    tied = reported("qwen3_5_tied", "pp2").stages
    copies = sum(stage.weight_bytes for stage in tied) - (
        reported("qwen3_5_tied", "tp1").stages[0].weight_bytes
    )
    config = config_of(tiny_model("qwen3_5_tied")).model_config
    assert copies >= config.get_vocab_size() * config.get_hidden_size() * 2


def test_streams_go_to_the_next_stage_and_tokens_back() -> None:
    first, middle, last = reported("llama", "pp3").stages
    hidden = config_of(tiny_model("llama")).model_config.get_hidden_size()
    assert first.step_tokens == 3  # 8 requests in 3 groups
    assert first.traffic.streams == middle.traffic.streams == 3 * hidden * 2
    assert last.traffic.streams == 3 * 8 * 2
    assert first.traffic.all_reduces == 0 == first.traffic.all_gathers


def test_captured_streams_travel_with_the_residual_stream(tmp_path: Path) -> None:
    capture = extraction(tmp_path)
    plain, captured = (reported("qwen3", "pp2", **more).stages[0] for more in ({}, capture))
    assert captured.traffic.streams == 2 * plain.traffic.streams


def test_experts_are_told_apart() -> None:
    shared, whole = (reported("mixtral", name) for name in ("tp2", "tp2ep"))
    assert shared.stages[0].traffic.experts > 0
    assert shared.stages[0].traffic == whole.stages[0].traffic
    assert reported("llama", "tp2").stages[0].traffic.experts == 0


def test_replicas_share_experts() -> None:
    apart, shared = (reported("mixtral", name) for name in ("dp2", "dp2ep"))
    config = config_of(tiny_model("mixtral")).model_config
    layers, hidden, sizes = config.get_num_layers(), config.get_hidden_size(), config.hf_config
    expert_bytes = 3 * hidden * sizes.intermediate_size * 2
    saved = layers * sizes.num_local_experts // 2 * expert_bytes
    assert apart.stages[0].weight_bytes - shared.stages[0].weight_bytes == saved
    assert apart.stages[0].traffic.total == 0 == apart.stages[0].exchange_seconds
    # 8 rows and their choices of two experts to the other replica, and 8 rows back.
    row = 2 * hidden * 2 + 2 * 8
    assert shared.stages[0].traffic.experts == shared.stages[0].traffic.total == 8 * layers * row
    assert shared.stages[0].exchange_seconds > 0


def test_memory_of_a_device_is_shared_by_rank() -> None:
    budget = Budget(device_bytes=200 * MIB, reserved_bytes=MIB)
    report = reported("llama", "pp2", budget, gpu_memory_utilization=0.5)
    assert report.is_possible
    for stage in report.stages:
        assert 0 < stage.rank_bytes <= 100 * MIB and stage.reserved_bytes == MIB
    assert max(stage.rank_bytes for stage in report.stages) > 98 * MIB


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("llama", "tp3", "cannot be divided among 3 tensor-parallel ranks"),
        ("llama", "pp5", "the model has 4 layers"),
        ("llama", "tp2ep", "the model has no experts"),
        ("llama", "pp2ep", "the model has no experts"),
        ("mixtral", "pp2dp2ep", "stages of several replicas do not share experts"),
    ],
)
def test_what_an_engine_refuses_is_refused(model: str, layout: str, message: str) -> None:
    report = reported(model, layout)
    assert message in report.refused and not report.is_possible and not report.stages


def test_a_stage_may_have_no_experts() -> None:
    """Of a hybrid with mixtures in some layers."""
    report = reported("nemotron_h_moe", "tp2pp2ep")
    assert not report.refused
    assert [stage.traffic.experts > 0 for stage in report.stages] == [True, False]


def test_what_does_not_fit_says_what_would() -> None:
    report = reported("llama", "tp2", Budget(arena_bytes=MIB // 16))
    assert "The longest that fits is" in report.too_large and report.stages
    assert report.one is None and not report.is_possible


def test_the_placement_that_does_not_fit_is_named() -> None:
    config = config_of(HYBRID.with_name("super_apriel_15b"), placement_alias=["x=all-gdn"])
    report = explain_layout(
        config, Layout.parse("tp2"), Budget(arena_bytes=2**30), Rates(), batch=8, context=100
    )
    assert report.too_large.startswith(",".join(["attention"] * 48) + ": One request of max_model")


def test_pages_may_be_given() -> None:
    report = reported("llama", "pp2", Budget(), num_gpu_blocks_override=64)
    whole = reported("llama", "tp1", Budget(), num_gpu_blocks_override=64)
    assert report.sequences == whole.sequences > 0
    assert sum(stage.arena_bytes for stage in report.stages) == whole.stages[0].arena_bytes


def test_the_configured_layout_must_be_possible() -> None:
    config = config_of(tiny_model("llama"), max_model_len=256, tensor_parallel_size=2)
    config.parallel_config.enable_expert_parallel = True
    with pytest.raises((VLLMValidationError, ValueError), match="no experts"):
        explain(config, Budget(arena_bytes=MIB), what_ifs=False)


def test_copies_of_experts_take_memory() -> None:
    options: dict[str, Any] = {"max_model_len": 256, "dtype": "bfloat16", "enable_eplb": True}
    options |= {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    plain, copied = (
        reported("mixtral", "tp2ep", eplb_config={"num_redundant_experts": size}, **options)
        for size in (0, 4)
    )
    config = config_of(tiny_model("mixtral"), dtype="bfloat16").model_config.hf_config
    expert = 3 * config.hidden_size * config.intermediate_size * 2
    more = plain.stages[0].weight_bytes + config.num_hidden_layers * 2 * expert
    assert copied.stages[0].weight_bytes == more
    # A token goes through as many as before.
    assert plain.one is not None and copied.one is not None
    assert copied.one.seconds == pytest.approx(plain.one.seconds)
    alone = reported("mixtral", "tp1ep", **options)
    assert alone.refused is not None and "--enable-eplb moves experts" in alone.refused


# ---- the best layout -----------------------------------------------------------------------------


def explanation(**options: Any) -> Explanation:
    config = config_of(tiny_model("llama"), max_model_len=256, **options)
    return explain(config, Budget(arena_bytes=4 * MIB), [100], what_ifs=False)


def test_one_device_has_no_layout() -> None:
    assert explanation().layout is None
    own = explanation(data_parallel_size=2).layout
    assert own is not None and own.link is None and own.report.layout == Layout(dp=2)


def test_layouts_of_four_h200() -> None:
    report = compared(HYBRID, 4, H200, 32_000)
    found = {one.layout.name: one for one in report.candidates}
    assert list(found) == ["dp4", "tp2dp2", "pp2dp2", "tp4", "tp2pp2", "pp4"]
    assert all(one.is_possible for one in found.values())
    assert report.device is DEVICES["H200"] and report.link is LINKS["NVLink4"]
    fast, many = report.lowest_latency, report.highest_throughput
    assert fast is not None and many is not None
    single = [one.one.seconds for one in report.candidates if one.one]
    full = [one.full.tokens_per_s for one in report.candidates if one.full]
    assert single[fast] == min(single) and full[many] == max(full)
    # One request is fastest where all read a part of the weights; stages take turns at it.
    assert report.candidates[fast].layout.name == "tp4"
    assert found["pp4"].one is not None and found["dp4"].one is not None
    assert found["pp4"].one.seconds > found["dp4"].one.seconds


def test_prefills_of_a_dense_27b() -> None:
    """Ranks share a prompt's work but wait for their sums; replicas and stages share prompts."""
    found = {
        one.layout.name: one.prefill
        for one in compared(DENSE, 4, H200, 8000, max_num_batched_tokens=8192).candidates
    }
    config = config_of(DENSE, max_num_batched_tokens=8192)
    alone = explain_layout(config, Layout(), H200, Rates(), 8, 8000).prefill
    assert alone is not None and alone.exchange_seconds == 0
    # Two FLOPs for nearly each of 27e9 parameters, and attention; the device makes 989e12.
    assert 2 * 25e9 < 989e12 / alone.tokens_per_s < 2 * 30e9
    ratio = {name: one.tokens_per_s / alone.tokens_per_s for name, one in found.items() if one}
    assert ratio["dp4"] == pytest.approx(4)
    assert 2 < ratio["tp4"] < ratio["tp2dp2"] < ratio["pp2dp2"] < 4
    assert found["tp4"] is not None and found["tp4"].exchange_seconds > 0
    short = explain_layout(config, Layout(), H200, Rates(), 8, 8000, prompt=100).prefill
    assert short is not None and short.tokens_per_s > alone.tokens_per_s


def test_sums_of_nccl_take_longer() -> None:
    """Without peer memory, or with it for the small sums of a decode step."""
    asked = (Layout(tp=2), H200, Rates(), 8, 8000)
    peers, nccl = (
        explain_layout(config_of(HYBRID, disable_custom_all_reduce=off), *asked)
        for off in (False, True)
    )
    assert peers.one and nccl.one and peers.prefill and nccl.prefill
    assert peers.one.exchange_seconds < 0.6 * nccl.one.exchange_seconds
    assert peers.prefill.exchange_seconds == nccl.prefill.exchange_seconds


def test_a_model_that_fits_only_divided() -> None:
    """64.7 GiB of weights and devices of 48 GB."""
    report = compared(MIXTURE, 2, Budget(device_bytes=48 * 10**9), max_model_len=32_768)
    found = {one.layout.name: one for one in report.candidates}
    assert list(found) == ["dp2", "dp2ep", "tp2", "tp2ep", "pp2"] and report.context == 32_768
    assert "No memory is left" in found["dp2"].too_large and not found["dp2"].refused
    assert all(found[name].is_possible for name in ("dp2ep", "tp2", "tp2ep", "pp2"))
    assert report.lowest_latency is not None and report.lowest_latency > 0


def test_nothing_is_decided_or_logged_for_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tiny_model("qwen3_5"), max_model_len=256)
    # Those of the process are listed, too, whoever made them.
    before = {one.what: one for one in config.decisions.decisions()}
    caplog.clear()
    report = compare_layouts(config, 2, Budget(arena_bytes=4 * MIB), Rates(), 8)
    assert report.highest_throughput is not None
    decided = {one.what: one for one in report.decisions}
    # Each layout planned an arena, and one of them stages.
    assert {what for what in decided if decided[what] != before.get(what)} <= {"attention backend"}
    assert {one.what: one for one in config.decisions.decisions()} == decided
    assert config.parallel_config.pipeline_parallel_size == 1
    assert "state arena" not in caplog.text and "layers per pipeline stage" not in caplog.text


@pytest.mark.parametrize(
    ("devices", "context", "options", "message"),
    [
        (0, 100, {}, "--devices 0: at least 1"),
        (2, 257, {}, r"outside 1..max_model_len \(256\)"),
        (2, 100, {"tensor_parallel_size": 2}, "--devices compares all sizes; leave out"),
    ],
)
def test_what_cannot_be_compared(
    devices: int, context: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compared(tiny_model("llama"), devices, H200, context, max_model_len=256, **options)
