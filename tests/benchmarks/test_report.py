# SPDX-License-Identifier: Apache-2.0
"""The tables in the docs are what the measurements say."""

from __future__ import annotations

import pytest

from benchmarks import gpu_tables, report
from benchmarks.measured_tables import compared, load


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_tables_are_current(page) -> None:  # type: ignore[no-untyped-def]
    text = page.read_text()
    assert report.rendered(text) == text, "run `python -m benchmarks.report`"
    assert "<!-- table" in text


def test_a_typed_figure_is_noticed() -> None:
    text = report.PAGES[0].read_text()
    assert report.rendered(text.replace(" ms |", " us |")) == text


def test_ratios_point_the_right_way() -> None:
    assert compared("x", "s", 2.0, 6.0, False).endswith("| 3.00 × |")
    assert compared("x", "tok/s", 6000, 3000, True).endswith("| 2.00 × |")


def test_a_step_sums_the_kernels_of_one_name() -> None:
    kernels = {
        "nvjet_a": {"us": 1500.0, "launches": 2},
        "nvjet_b": {"us": 500.0, "launches": 1},
        "_state_pass_kernel": {"us": 1000.0, "launches": 1},
        "void at::native::copy<float, 4>(int)": {"us": 10.0, "launches": 1},
    }
    window = {"wall_us": 4000.0, "device_us": 3010.0, "kernels": kernels}
    row = gpu_tables.step_rows({"decode_8": window}).splitlines()[-1]
    assert row == "| decode 8 | 4.00 ms | 3.01 ms | cuBLAS 2.00, state_pass 1.00, copy 0.01 |"


def test_a_workload_has_its_floor_and_spread() -> None:
    row = gpu_tables._gpu_row("bs8_128_256", "x", "tok/s", [2000.0, 2500.0], True)
    assert row.endswith("| 3,700 tok/s | 20.0% of 2 |")
    assert gpu_tables._gpu_row("mixed_512", "x", "s", [18.0], False).endswith("| | |")


def test_every_shown_kernel_was_measured() -> None:
    rows = gpu_tables.kernels().splitlines()[2:]
    assert {row.split(" | ")[0].strip("| ") for row in rows} >= {
        "paged_attention", "causal_conv1d", "gdn_prefill", "gdn_decode"
    }  # fmt: skip
    assert "| gdn_decode | 256 sequences |" in "\n".join(rows)


def test_a_kernel_shows_what_it_moves_or_computes() -> None:
    moved = dict(op="a", shape="1", us=10.0, bytes=268.9e6, rate=4000.0, unit="GB/s", share=0.93)
    done = dict(op="b", shape="2", us=10.0, flops=2.75e11, rate=395.0, unit="TFLOP/s", share=0.5)
    rows = gpu_tables.kernel_rows([moved, done, moved | dict(bytes=5120.0)]).splitlines()[2:]
    assert rows[0] == "| a | 1 | 10.0 µs | 269 MB | 4,000 GB/s | 93% |"
    assert rows[1] == "| b | 2 | 10.0 µs | 275 GFLOP | 395 TFLOP/s | 50% |"
    assert rows[2].split(" | ")[3] == "5.12 kB"


def test_kernel_rows_are_consistent() -> None:
    for row in load("h200_kernels.json"):
        scale, amount = (1e6, row["flops"]) if row["unit"] == "TFLOP/s" else (1e3, row["bytes"])
        assert amount == pytest.approx(row["rate"] * row["us"] * scale, rel=1e-6), row


def test_cpu_rows_name_their_instruction_set() -> None:
    """Whatever order the files have: the widest instruction set first."""
    run = {"prefill_tokens": 2048, "decode_step_ms": {"ours": 2.0, "transformers": 6.0}}
    run["prefill_ms"] = {"ours": 10.0, "transformers": 15.0}
    runs = [
        {**run, "dtype": "float32", "instruction_set": "avx2"},
        {**run, "dtype": "bfloat16", "instruction_set": "avx512_bf16"},
    ]
    _, _, first, second, third, fourth = report.cpu_rows(runs).splitlines()
    assert first == "| decode step, batch 8, bfloat16, AVX-512 BF16 | 2.00 ms | 6.00 ms | 3.00 × |"
    assert "prefill of 2,048 tokens, bfloat16, AVX-512 BF16" in second and "1.50 ×" in second
    assert "float32, AVX2" in third and "float32, AVX2" in fourth


def test_each_other_model_is_beside_its_peer() -> None:
    header, _, first, *_, last = gpu_tables.other_dimensions().splitlines()
    assert header.count("vLLM") == 2
    assert first.count("ms") == 4 and "5.43 ms" in first and "5.41 ms" in first
    assert "| 10.87 s |" in last and "| 12.10 s |" in last
    assert {line.count("|") for line in gpu_tables.other_dimensions().splitlines()} == {8}
