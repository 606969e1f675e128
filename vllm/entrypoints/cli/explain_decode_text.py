# SPDX-License-Identifier: Apache-2.0
"""A `DecodeReport` as text."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.entrypoints.cli.text_table import amount, table
from vllm.v1.core.decode_cost import DecodeCost, PartCost
from vllm.v1.core.explain_decode import DecodeReport, PlacementDecode

_PART_COLUMNS = ("kind", "parts", "weights", "state", "per token", "GFLOP", "kernels", "ms")


def decode_sections(report: DecodeReport) -> list[list[str]]:
    """A row per placement, then the parts of the engine's own at the longest length."""
    own = report.placements[0]
    longest = max(own.costs, key=lambda cost: cost.context)
    rows = [_row(one) for one in report.placements]
    return [
        [_title(report), *table(_columns(own), rows)],
        [
            f"Parts of that step at {longest.context:,} tokens{_whose(own)}",
            *table(_PART_COLUMNS, list(_parts(longest))),
        ],
    ]


def _title(report: DecodeReport) -> str:
    device = report.batch.device
    return (
        f"A decode step of {report.batch.size:,} sequences, predicted for the {device.name} "
        f"({device.bytes_per_s / 1e12:.4g} TB/s, {device.flops_per_s / 1e12:,.4g} TFLOP/s, "
        f"{device.launch_s * 1e6:g} us per kernel)"
    )


def _whose(one: PlacementDecode) -> str:
    return f" of {', '.join(one.names)}" if one.names else ""


def _columns(own: PlacementDecode) -> list[str]:
    columns = ["placement" if own.names else "model"]
    for cost in own.costs:
        columns.append(f"ms at {cost.context:,}")
        columns += ["speed"] if own.speedups else []
        columns.append("fit")
    return columns


def _row(one: PlacementDecode) -> list[str]:
    row = [", ".join(one.names) or "as configured"]
    for i, cost in enumerate(one.costs):
        row.append(f"{cost.seconds * 1e3:.3f}")
        row += [f"{one.speedups[i]:.2f}x"] if one.speedups else []
        row.append(f"{one.sequences[i]:,}")
    return row


def _parts(cost: DecodeCost) -> Iterator[list[str]]:
    for part in cost.parts:
        yield _part(part, cost.batch)
    whole = PartCost(
        "all", 1, cost.weight_bytes, cost.state_bytes, cost.flops, cost.launches, cost.seconds
    )
    yield _part(whole, cost.batch)


def _part(part: PartCost, batch: int) -> list[str]:
    return [
        part.kind,
        str(part.count),
        amount(part.weight_bytes),
        amount(part.state_bytes),
        amount((part.weight_bytes + part.state_bytes) / batch),
        f"{part.flops / 1e9:,.4g}",
        str(part.launches),
        f"{part.seconds * 1e3:.3f}",
    ]
