# SPDX-License-Identifier: Apache-2.0
"""`vllm explain`: flags, tables, JSON and picture."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from vllm.entrypoints.cli.explain import byte_count, token_counts
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.cli.text_table import amount

ROOT = Path(__file__).parents[2]
HYBRID = str(ROOT / "benchmarks" / "qwen3_5_4b")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets a default for processes it starts, which must not last."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a config and nothing else: 2 layers, 64 bytes per token and layer."""
    path = tmp_path_factory.mktemp("dense")
    LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(path)
    return str(path)


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["explain", *argv, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100GB", 10**11),
        ("96GiB", 96 << 30),
        ("1.5 GB", 1_500_000_000),
        ("500kB", 500_000),
        ("8K", 8192),
        ("12345", 12345),
    ],
)
def test_byte_counts(text: str, expected: int) -> None:
    assert byte_count(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "100 bytes", "1.5", "-3GB"])
def test_bad_byte_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_count(text)


def test_token_counts() -> None:
    assert token_counts("12,1k,32K") == [12, 1000, 32768]


def test_amounts() -> None:
    sizes = [0, 999, 51_530_752, 100 * 10**9, 2 * 10**12]
    assert [amount(n) for n in sizes] == ["0 B", "999 B", "51.53 MB", "100 GB", "2,000 GB"]


def test_json_has_the_whole_report(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, dense, "--memory", "1MB", "--lengths", "16,100", "--block-size", "32")
    (group,) = report["groups"]
    assert (group["bytes_per_token"], group["tokens_per_block"]) == (128.0, 32)
    assert report["page_bytes"] == 32 * 128
    assert report["num_pages"] == 10**6 // report["page_bytes"]
    assert [r["blocks"] for r in report["requests"]] == [[1], [4]]
    assert report["requests"][1]["num_bytes"] == 4 * report["page_bytes"]
    assert {d["what"] for d in report["decisions"]} >= {"max_num_seqs"}
    assert "--block-size 16" in {row["flag"] for row in report["what_ifs"]}
    assert as_json(capsys, dense, "--memory", "1MB", "--no-what-ifs")["what_ifs"] == []


def test_memory_of_the_device(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device-memory", "1GB", "--gpu-memory-utilization", "0.5", "--no-what-ifs"]
    memory = as_json(capsys, dense, *flags, "--reserved-memory", "1MB")["memory"]
    assert memory["arena_bytes"] == 500_000_000 - memory["weight_bytes"] - 1_000_000
    assert as_json(capsys, dense, "--num-gpu-blocks-override", "9")["num_pages"] == 9


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", HYBRID, "--memory", "100GB", "--lengths", "12,1k"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "arena 100,000,000,000 bytes (given)",
        "Pages: 1,940 of 51,530,752 bytes",
        "one cached turn keeps 51,530,752 bytes",
        "At 12 tokens the largest waste is 0.25%: rows after the last token of a block",
        "Most would gain: --mamba-ssm-cache-dtype bfloat16, 1,919 -> 3,718 requests",
        "--kv-cache-dtype float32: not possible:",
        "max_num_seqs: 256",
    ):
        assert part in shown
    assert re.search(r"^  1,000 +1 +63 +84,657,664 +2 +1,180 ", shown, re.MULTILINE)
    assert re.search(r"^  --tensor-parallel-size 2 .*per device", shown, re.MULTILINE)
    assert main(["explain", HYBRID, "--memory", "100GB", "--lengths", "12,1k", "-tp", "2"]) == 0
    halved = capsys.readouterr().out
    assert "bytes and pages of one of 2 tensor-parallel ranks" in halved
    assert re.search(r"^  1,000 +1 +63 +42,3\d\d,\d\d\d ", halved, re.MULTILINE)


def test_the_configured_layout(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory", "1MB", "--lengths", "12", "--no-what-ifs", "--decode-batch", "8"]
    assert main(["explain", dense, *flags, "-pp", "2", "-dp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "bytes and pages of all 2 pipeline stages together" in shown
    assert "Layout pp2dp2: 2 replicas of 2 stages of 1 rank, 4 devices" in shown
    assert re.search(r"^  stage 1 +1 .*  128 B +1 +\d", shown, re.MULTILINE)  # 4 rows of 16 x 2
    assert "and NVLink4 (450 GB/s each way, 6.6 us per exchange" in shown
    report = as_json(capsys, dense, *flags, "-pp", "2", "--decode-link", "1e9,3")
    (one, two), link = report["layout"]["report"]["stages"], report["layout"]["link"]
    assert one["traffic"]["streams"] == 4 * 16 * 2 and two["traffic"]["streams"] == 4 * 8
    assert link["name"] == "given link" and link["base_s"] == pytest.approx(3e-6)
    assert as_json(capsys, dense, *flags)["layout"] is None


def test_layouts_of_devices(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One key/value head is on both of two ranks; 2 layers are no 4 stages."""
    flags = ["--memory", "1MB", "--lengths", "12", "--devices", "4"]
    assert main(["explain", dense, *flags, "--max-num-seqs", "8"]) == 0
    shown = capsys.readouterr().out
    assert "Layouts of 4 devices, requests of 12 tokens" in shown
    for name in ("dp4", "tp2dp2", "pp2dp2", "tp2pp2"):
        assert re.search(rf"^  {name} +[124] +[124] +[124] +yes ", shown, re.MULTILINE)
    refused = "model.layers.0: 2 attention heads cannot be divided among 4"
    assert f"  tp4: not possible: {refused}" in shown
    assert "  pp4: not possible: --pipeline-parallel-size 4: the model has 2 layers" in shown
    assert "--max-num-seqs 8 bounds full batches" in shown
    assert re.search("^Best for latency: .*-dp", shown, re.MULTILINE)
    assert re.search("^Best for throughput: -dp 4,", shown, re.MULTILINE)
    report = as_json(capsys, dense, *flags)
    best = report["candidates"][report["highest_throughput"]]["layout"]
    assert best == {"tp": 1, "pp": 1, "dp": 4, "ep": False}
    assert main(["explain", dense, *flags, "--plot", "x.png"]) == 1
    assert "leave out --devices" in capsys.readouterr().err
    flags = [*flags, "--memory", "16kB"]
    assert main(["explain", dense, *flags]) == 0
    shown = capsys.readouterr().out
    assert "dp4: does not fit: " in shown and "No layout is possible." in shown


def test_the_example_in_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/state_memory.md shows what the command prints."""
    guide = (ROOT / "docs" / "state_memory.md").read_text(encoding="utf-8")
    match = re.search(r"```console\n\$ vllm explain (.*?)\n(.*?)```", guide, re.DOTALL)
    assert match is not None
    assert main(["explain", *match[1].replace("Qwen3.5-4B", HYBRID).split()]) == 0
    shown = capsys.readouterr().out.replace(HYBRID, "Qwen3.5-4B")
    head, *sections = match[2].split("\n\n")
    assert head.splitlines()[0] in shown
    # Batch limits and decisions depend on the machine, and so does what can be asked for.
    for section in sections:
        if not (section.startswith("What if") and torch.cuda.is_available()):
            assert section.strip("\n") in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU keeps state otherwise")
def test_the_example_of_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/parallel.md shows what the command prints of layouts."""
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    match = re.search(r"```console\n\$ vllm explain (.*?)\n(.*?)```", page, re.DOTALL)
    assert match is not None
    assert main(["explain", *match[1].replace("Qwen3.5-4B", HYBRID).split()]) == 0
    assert match[2] in capsys.readouterr().out


def test_too_long_for_the_memory(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", dense, "--memory", "20kB", "--lengths", "12"]) == 0
    assert "would not start with --max-model-len 4096" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory", "1GB", "--device-memory", "2GB"], "give one of them"),
        (["--model", "x"], "as MODEL"),
        (["--lengths", "5000"], "outside 1..max_model_len (4096)"),
        (["--memory", "1kB"], "less than one page"),
        (["--memory", "1MB", "-tp", "3"], "divided among 3"),
        (["--memory", "1MB", "-pp", "3"], "the model has 2 layers"),
        (["--memory", "1MB", "-tp", "2", "-ep"], "the model has no experts"),
        (["--memory", "1MB", "--devices", "0"], "at least 1"),
        (["--memory", "1MB", "--devices", "2", "--nnodes", "2"], "leave out --nnodes"),
        (["--memory", "1MB", "--reserved-memory", "1kB"], "--reserved-memory is a part of"),
        (["--device-memory", "1GB", "--reserved-memory=-1"], "--reserved-memory -1: at least 0"),
        (["--memory", "1MB", "--decode-batch", "0"], "--decode-batch 0: at least 1"),
        (["--memory", "1MB", "--devices", "2", "--decode-batch", "0"], "--decode-batch 0: at lea"),
        (["--memory", "1MB", "-tp", "2", "--decode-link", "x"], "one of NVLink3"),
        (["--memory", "1MB", "-tp", "2", "--decode-device", "1e12,1e15"], "--decode-link"),
    ],
)
def test_errors_name_the_cause(
    dense: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", dense, *flags]) == 1
    assert message in capsys.readouterr().err


def test_picture(dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.png"
    assert main(["explain", dense, "--memory", "1MB", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["explain", dense, "--memory", "1MB", "--plot", str(tmp_path / "a.xyz")]) == 1
    assert "--plot" in capsys.readouterr().err


def test_a_picture_needs_the_extra(
    dense: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["explain", dense, "--memory", "1MB", "--plot", "a.png"]) == 1
    assert "pip install 'vllm[plot]'" in capsys.readouterr().err
