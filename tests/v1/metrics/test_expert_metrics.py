# SPDX-License-Identifier: Apache-2.0
"""Loads of experts and of the ranks that have them, as numbers and as text."""

from __future__ import annotations

import pytest

from vllm.v1.metrics.expert_metrics import expert_metrics_text, imbalance, mean_balancedness

COUNTS = {"a": [30, 10], "b": [0, 0]}


def lines(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if not line.startswith("#")]


def test_imbalance() -> None:
    assert imbalance(COUNTS["a"]) == 1.5 and imbalance(COUNTS["b"]) is None


def test_balancedness_is_the_mean_of_all_layers() -> None:
    """Ranks that share layers say the same, stages have different ones."""
    ranks = [{"a": [0.5, 1.0]}, {"a": [0.5, 1.0]}, {"b": [0.7, 0.8]}, {"b": [0.7, 0.8]}]
    assert mean_balancedness(ranks) == pytest.approx((0.6, 0.9))
    assert mean_balancedness([{}, {}]) is None


def test_metrics() -> None:
    plain = ['vllm:expert_imbalance{layer="a",model_name="m"} 1.5']
    assert lines(expert_metrics_text(COUNTS, "m")) == plain
    found = lines(expert_metrics_text(COUNTS, "m", (0.25, 0.75)))
    assert found == [
        *plain,
        'vllm:expert_balancedness{model_name="m",when="before"} 0.25',
        'vllm:expert_balancedness{model_name="m",when="after"} 0.75',
    ]
