# SPDX-License-Identifier: Apache-2.0
"""How well speculation did, from the server's metrics before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_PREFIX = "vllm:spec_decode_num_"


@dataclass
class SpeculationCounts:
    """Counters of `GET /metrics`, summed over engines."""

    drafts: float = 0
    draft_tokens: float = 0
    accepted_tokens: float = 0
    accepted_per_position: dict[int, float] = field(default_factory=dict)
    #: nothing from servers that do not say so: their drafts are as long as each other
    drafted_per_position: dict[int, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SpeculationCounts:
        """From the Prometheus text format; all zero when the server does not speculate."""
        counts = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith(_PREFIX):
                    continue
                name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                if name == "drafts":
                    counts.drafts += sample.value
                elif name == "draft_tokens":
                    counts.draft_tokens += sample.value
                elif name == "accepted_tokens":
                    counts.accepted_tokens += sample.value
                elif name == "accepted_tokens_per_pos":
                    _add(counts.accepted_per_position, sample)
                elif name == "draft_tokens_per_pos":
                    _add(counts.drafted_per_position, sample)
        return counts

    def __sub__(self, before: SpeculationCounts) -> SpeculationCounts:
        return SpeculationCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            _less(self.accepted_per_position, before.accepted_per_position),
            _less(self.drafted_per_position, before.drafted_per_position),
        )

    def rate(self, position: int) -> float:
        """Of the drafts that were long enough, those that were accepted up to here."""
        drafted = self.drafted_per_position.get(position, self.drafts)
        return self.accepted_per_position[position] / drafted if drafted else 0.0


def _add(counts: dict[int, float], sample: Sample) -> None:
    position = int(sample.labels["position"])
    counts[position] = counts.get(position, 0) + sample.value


def _less(after: dict[int, float], before: dict[int, float]) -> dict[int, float]:
    return {position: after[position] - before.get(position, 0) for position in sorted(after)}


def speculation_result(
    before: SpeculationCounts | None, after: SpeculationCounts | None
) -> dict[str, Any]:
    """Keys for the result; none without drafts. Rates in percent, except those per position."""
    if before is None or after is None or after.drafts <= before.drafts:
        return {}
    found = after - before
    drafts, draft_tokens, accepted = found.drafts, found.draft_tokens, found.accepted_tokens
    return {
        "spec_decode_acceptance_rate": 100 * accepted / draft_tokens if draft_tokens else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(draft_tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            found.rate(position) for position in found.accepted_per_position
        ],
    }
