# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as users see them."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class Logprob:
    """One token at one position: natural log of its probability, `rank` (1 = most likely), text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: per generated token: token id -> logprob, the sampled token first
SampleLogprobs: TypeAlias = list[dict[int, Logprob]]
#: per prompt position, None for the first: token id -> logprob, the actual token first
PromptLogprobs: TypeAlias = list[dict[int, Logprob] | None]
