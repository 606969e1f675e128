# SPDX-License-Identifier: Apache-2.0
"""The models of the tree are clean, but for what the allow-list lets pass with a reason."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from apriel2_models import MAMBA, MIXERS, pattern, save
from tiny_models import FAMILIES, tiny_model

from tests.nightly import nightly
from vllm.compilation.graph_safety import report as report_module
from vllm.compilation.graph_safety.report import Allowance, Report, allowances, as_table
from vllm.compilation.graph_safety.targets import check_model
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig

# What a process happens to have imported changes no finding.
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector  # noqa: F401
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_outline

pytestmark = pytest.mark.slow

#: the list may only shrink: lower this number when an entry goes
ALLOWANCES = 10


@cache
def report_of(family: str) -> Report:
    return check_model(EngineArgs(model=str(tiny_model(family))).create_engine_config())


#: other families walk every function that these do
PARTS_OF_OTHERS = (
    *("llama3_rope", "qwen3", "qwen3_sliding", "qwen3_5_tied", "qwen3_5_wide", "qwen3_5_wrapper"),
    *("mixtral", "qwen3_moe", "qwen3_5_moe_wrapper", "gemma3", "deepseek_v2"),
    *("nemotron_h", "granite_h_dense"),
)
OTHERS = [family for family in FAMILIES if family not in PARTS_OF_OTHERS]


@pytest.mark.parametrize("family", [*OTHERS, *nightly(*PARTS_OF_OTHERS)])
def test_no_family_has_a_hazard(family: str) -> None:
    report = report_of(family)
    assert report.is_clean, "\n" + as_table([report])


def test_apriel2_has_no_hazard(tmp_path: Path) -> None:
    """A layer for each mixer of supernets."""
    mixers = MIXERS | MAMBA
    decoder = pattern([*mixers], mixers)
    report = check_model(EngineArgs(str(save(tmp_path, decoder, {}))).create_engine_config())
    assert report.is_clean, "\n" + as_table([report])
    layers = "vllm.model_executor.layers"
    assert {
        "vllm.model_executor.models.apriel2.Apriel2DecoderLayer.mix_stream",
        f"{layers}.gated_delta_net.GatedDeltaNet.decode",
        f"{layers}.kimi_delta_attention.KimiDeltaAttention.decode",
        f"{layers}.grouped_mamba.GroupedMamba.decode",
    } <= set(report.functions)


def test_the_step_and_the_gpus_kernels_are_walked() -> None:
    walked = set(report_of("qwen3_5").functions)
    assert {
        "vllm.model_executor.layers.attention.Attention._attend",
        "vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_decode.hopper_decode",
        "vllm.kernels.attention.triton_decode.decode_attention",
        "vllm.kernels.step.triton.prepare",
        "vllm.kernels.step.triton.accept",
        "vllm.kernels.sampling.draw.draw_tokens",
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder.build",
        "vllm.v1.spec_decode.ngram.NgramDrafter.propose",
        "vllm.distributed.device_communicators.pushed_sums.PushedSums.begin",
        "vllm.model_executor.models.draft_logits.DraftLogits.best",
    } <= walked
    assert not any(name.startswith("vllm.kernels.step.cpu") for name in walked)


def test_the_allow_list_has_no_entry_too_many() -> None:
    used = {one for family in ("qwen3_5", "llama") for _, one in report_of(family).allowed}
    assert set(allowances()) == used, "an entry that no finding needs must go"
    assert len(allowances()) == ALLOWANCES


def test_an_entry_needs_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "allowed.json"
    file.write_text(json.dumps([{"function": "m.f", "hazard": 1, "reason": " "}]))
    monkeypatch.setattr(report_module, "_FILE", file)
    with pytest.raises(ValueError, match="without a reason: m.f"):
        allowances.__wrapped__()


@pytest.mark.parametrize(
    ("function", "hazard", "covered"),
    [("m.f", 1, True), ("m.f", 2, False), ("m.fg", 1, False), ("m.*", 1, True), ("n.*", 1, False)],
)
def test_an_entry_covers_one_hazard_of_one_place(function: str, hazard: int, covered: bool) -> None:
    finding = Finding("m.py", 3, 1, 1, "read", "m.f", "x.item()")
    assert Allowance(function, hazard, "because").covers(finding) == covered


def test_the_choice_among_copies_of_experts_is_walked() -> None:
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    report = check_model(EngineArgs(str(tiny_model("mixtral")), **spread).create_engine_config())
    assert "vllm.model_executor.layers.expert_copies.ExpertCopies.choose" in report.functions
    assert report.is_clean, "\n" + as_table([report])


def test_each_pipeline_stage_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int | None] = []
    build = model_outline.models_on_meta

    def built(config: VllmConfig, size: int = 1, stage: int | None = None) -> Any:
        walked.append(stage)
        return build(config, size, stage)

    monkeypatch.setattr(model_outline, "models_on_meta", built)
    args = EngineArgs(str(tiny_model("llama")), pipeline_parallel_size=2)
    report = check_model(args.create_engine_config())
    assert walked == [0, 1] and report.is_clean, "\n" + as_table([report])
    assert "vllm.v1.worker.pipeline_stage.PipelineStage.receive" in report.functions
