# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of one step as device tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.sampling_params import SAMPLING_EPS, SamplingParams
from vllm.utils.torch_utils import to_device

#: where ranks share a vocabulary, as many of a rank's best tokens at most go to the others
MOST_BEST = 256


@dataclass(frozen=True)
class SamplingMetadata:
    """Per-row parameters; a field is None when no row uses the feature.

    `temperature, top_p, min_p [n]` fp32 (temperature 0: greedy), `top_k [n]` int64 (vocabulary
    size: off), `seeds [n]` int64. `num_logprobs`: the largest number of top logprobs asked for (0:
    only the chosen token's), None when nobody asked. `top_p_alone`: some row uses top-p without
    top-k and min-p. `largest_top_k`: of the rows whose filters follow from at most `MOST_BEST`
    tokens; `gathered_rows [m]` int64 are the others, None without any.
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor | None
    num_logprobs: int | None
    top_p_alone: bool = False
    largest_top_k: int = 0
    gathered_rows: Tensor | None = None

    @classmethod
    def build(
        cls, params: list[SamplingParams], vocab_size: int, device: torch.device
    ) -> SamplingMetadata:
        logprobs = [
            vocab_size if p.logprobs == -1 else p.logprobs for p in params if p.logprobs is not None
        ]
        num_logprobs = max(logprobs, default=None)
        random_rows = [p.temperature >= SAMPLING_EPS for p in params]
        if not any(random_rows):
            return cls(None, None, None, None, None, num_logprobs)
        drawn = list(zip(params, random_rows, strict=True))

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        def optional(values: list[float], off: float, dtype: torch.dtype) -> Tensor | None:
            # A greedy row ignores its filters.
            kept = [v if r else off for v, r in zip(values, random_rows, strict=True)]
            return column(kept, dtype) if any(v != off for v in kept) else None

        bounded = [p.top_k if r and 0 < p.top_k < vocab_size else 0 for p, r in drawn]
        gathered = [
            i
            for i, ((p, r), k) in enumerate(zip(drawn, bounded, strict=True))
            if k > MOST_BEST or (r and p.top_p < 1.0 and not k)
        ]
        return cls(
            temperature=column(
                [p.temperature if r else 0.0 for p, r in zip(params, random_rows, strict=True)],
                torch.float32,
            ),
            top_k=optional(
                [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params],
                vocab_size,
                torch.int64,
            ),
            top_p=optional([p.top_p for p in params], 1.0, torch.float32),
            min_p=optional([p.min_p for p in params], 0.0, torch.float32),
            seeds=column(
                [_seed(p) if r else 0 for p, r in zip(params, random_rows, strict=True)],
                torch.int64,
            ),
            num_logprobs=num_logprobs,
            top_p_alone=any(
                r and p.top_p < 1.0 and p.min_p == 0.0 and not 0 < p.top_k < vocab_size
                for p, r in drawn
            ),
            largest_top_k=max((k for k in bounded if k <= MOST_BEST), default=0),
            gathered_rows=to_device(torch.tensor(gathered), device) if gathered else None,
        )


def _seed(params: SamplingParams) -> int:
    if params.seed is None:
        raise ValueError(
            "a request reached the sampler without a seed; the input processor sets it"
        )
    low = params.seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
