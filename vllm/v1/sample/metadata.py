# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of one step as device tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.sampling_params import SAMPLING_EPS, SamplingParams
from vllm.utils.torch_utils import to_device


@dataclass(frozen=True)
class SamplingMetadata:
    """Per-row parameters; a field is None when no row uses the feature.

    `temperature, top_p, min_p [n]` fp32 (temperature 0: greedy), `top_k [n]` int64 (vocabulary
    size: off), `seeds [n]` int64. `num_logprobs`: the largest number of top logprobs asked for (0:
    only the chosen token's), None when nobody asked. `top_p_alone`: some row uses top-p without
    top-k and min-p.
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor | None
    num_logprobs: int | None
    top_p_alone: bool = False

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

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        def optional(values: list[float], off: float, dtype: torch.dtype) -> Tensor | None:
            # A greedy row ignores its filters.
            kept = [v if r else off for v, r in zip(values, random_rows, strict=True)]
            return column(kept, dtype) if any(v != off for v in kept) else None

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
                for p, r in zip(params, random_rows, strict=True)
            ),
        )


def _seed(params: SamplingParams) -> int:
    if params.seed is None:
        raise ValueError(
            "a request reached the sampler without a seed; the input processor sets it"
        )
    low = params.seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
