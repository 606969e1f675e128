# SPDX-License-Identifier: Apache-2.0
"""How well speculation did, from the server's metrics before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:spec_decode_num_"


@dataclass
class SpeculationCounts:
    """Counters of `GET /metrics`, summed over engines."""

    drafts: float = 0
    draft_tokens: float = 0
    accepted_tokens: float = 0
    accepted_per_position: dict[int, float] = field(default_factory=dict)

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
                    position = int(sample.labels["position"])
                    before = counts.accepted_per_position.get(position, 0)
                    counts.accepted_per_position[position] = before + sample.value
        return counts


def speculation_result(
    before: SpeculationCounts | None, after: SpeculationCounts | None
) -> dict[str, Any]:
    """Keys for the result; none without drafts. Rates in percent, except those per position."""
    if before is None or after is None or after.drafts <= before.drafts:
        return {}
    drafts = after.drafts - before.drafts
    draft_tokens = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    return {
        "spec_decode_acceptance_rate": 100 * accepted / draft_tokens if draft_tokens else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(draft_tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            (count - before.accepted_per_position.get(position, 0)) / drafts
            for position, count in sorted(after.accepted_per_position.items())
        ],
    }
