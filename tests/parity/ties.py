# SPDX-License-Identifier: Apache-2.0
"""Whether texts differ only where two tokens are as likely as each other, within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm import RequestOutput
from vllm.outputs import CompletionOutput

#: of two log-probabilities in bfloat16: two steps of logits between 8 and 16. See
#: docs/speculative_decoding.md, "What is exact"
BOUND = 0.125


@dataclass(frozen=True)
class Difference:
    """The first token that differs: its place in the output, and by how much each of the two runs
    finds its own token more likely than the other's; infinite if the other is not among the
    tokens whose log-probabilities are known."""

    position: int
    margins: tuple[float, float]

    def is_tie(self, bound: float) -> bool:
        return max(self.margins) <= bound


def first_difference(found: CompletionOutput, expected: CompletionOutput) -> Difference | None:
    """None if the tokens are the same; ValueError for outputs without log-probabilities, or of
    which one goes on where the other has ended. What follows a difference has another context."""
    mine, theirs = list(found.token_ids), list(expected.token_ids)
    for i, (own, other) in enumerate(zip(mine, theirs, strict=False)):
        if own != other:
            return Difference(i, (_margin(found, i, own, other), _margin(expected, i, other, own)))
    if len(mine) != len(theirs):
        raise ValueError(f"{len(mine)} tokens against {len(theirs)}, the first of them the same")
    return None


def _margin(output: CompletionOutput, position: int, own: int, other: int) -> float:
    if output.logprobs is None:
        raise ValueError("ties are judged by log-probabilities: ask for at least 2")
    known = output.logprobs[position]
    return known[own].logprob - known[other].logprob if other in known else float("inf")


def check_ties(
    found: Sequence[RequestOutput], expected: Sequence[RequestOutput], bound: float = BOUND
) -> list[Difference]:
    """The first differences of all completions; AssertionError for one that is no tie."""
    differences = []
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            difference = first_difference(mine, theirs)
            if difference is not None:
                differences.append(difference)
                assert difference.is_tie(bound), f"request {one.request_id}: {difference}"
    return differences
