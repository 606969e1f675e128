# SPDX-License-Identifier: Apache-2.0
"""How evenly a mixture's tokens are spread over its experts, as numbers and as a metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


def imbalance(tokens: list[int]) -> float | None:
    """The most tokens of an expert over the mean: 1 where all got as many; None without tokens."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else None


def total_counts(
    of_workers: Sequence[dict[str, list[int]]], num_ranks: int
) -> dict[str, list[int]]:
    """Tokens per expert of each layer, over all replicas. `of_workers`: what each worker counted,
    `num_ranks` of each replica in a row: those that have a layer all route every token, pipeline
    stages have different layers."""
    total: dict[str, list[int]] = {}
    for first in range(0, len(of_workers), num_ranks):
        ranks = of_workers[first : first + num_ranks]
        replica = {layer: tokens for counts in ranks for layer, tokens in counts.items()}
        for layer, tokens in replica.items():
            before = total.get(layer, [0] * len(tokens))
            total[layer] = [a + b for a, b in zip(before, tokens, strict=True)]
    return total


def mean_balancedness(
    of_workers: Iterable[Mapping[str, list[float]]],
) -> tuple[float, float] | None:
    """The mean of all layers, before and after the last rearrangement of experts; None before the
    first. `of_workers`: each one's layers."""
    layers = {name: pair for worker in of_workers for name, pair in worker.items()}
    if not layers:
        return None
    before, after = (sum(column) / len(layers) for column in zip(*layers.values(), strict=True))
    return before, after


class _ExpertLoads(Collector):
    """One gauge per layer that had tokens, and one per side of a rearrangement."""

    def __init__(
        self,
        counts: Mapping[str, list[int]],
        model_name: str,
        balancedness: tuple[float, float] | None,
    ) -> None:
        self._counts, self._model_name = counts, model_name
        self._balancedness = balancedness

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Of the counts given."""
        gauge = GaugeMetricFamily(
            "vllm:expert_imbalance",
            "Tokens of the busiest expert of a layer over the mean, since the start.",
            labels=("model_name", "layer"),
        )
        for layer, tokens in self._counts.items():
            value = imbalance(tokens)
            if value is not None:
                gauge.add_metric((self._model_name, layer), value)
        yield gauge
        if self._balancedness is None:
            return
        gauge = GaugeMetricFamily(
            "vllm:expert_balancedness",
            "Mean load of a rank over the largest, before and after experts were rearranged.",
            labels=("model_name", "when"),
        )
        for when, value in zip(("before", "after"), self._balancedness, strict=True):
            gauge.add_metric((self._model_name, when), value)
        yield gauge


def expert_metrics_text(
    counts: Mapping[str, list[int]],
    model_name: str,
    balancedness: tuple[float, float] | None = None,
) -> bytes:
    """Prometheus text of `counts`: layer -> tokens of every expert; `balancedness`: see
    `mean_balancedness`."""
    registry = CollectorRegistry()
    registry.register(_ExpertLoads(counts, model_name, balancedness))
    return generate_latest(registry)
