# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.adjusted_rows import AdjustedRow, adjusted_rows
from vllm.v1.sample.filters import apply_min_p, apply_top_k_top_p
from vllm.v1.sample.gumbel import best_tokens, gumbel_sample
from vllm.v1.sample.logprobs import gather_logprobs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.token_masks import TokenMasks


def sample(
    logits: Tensor,
    metadata: SamplingMetadata,
    positions: Tensor,
    adjustments: Sequence[AdjustedRow],
    masks: TokenMasks | None = None,
) -> SamplerOutput:
    """Sample one token per row of `logits [n, vocab]` (may change in place).

    `positions [n]` int64: sequence position the sampled token will take. `adjustments`: (row,
    adjustments, output tokens so far) of the rows that have any. A row of which adjustments and
    `masks` leave nothing samples `NO_TOKEN`. Logprobs are those of the unprocessed logits.
    """
    raw, keep = logits, metadata.num_logprobs is not None
    adjusted = adjusted_rows(adjustments, logits.device)
    if adjusted is not None:
        logits = adjusted.change(logits, keep)
    if masks is not None:
        if keep and logits is raw:
            logits = raw.clone()
        masks.apply(logits)
    token_ids = _draw(logits, metadata, positions)
    if adjusted is not None:
        adjusted.observe(token_ids)
    if metadata.num_logprobs is None:
        return SamplerOutput(token_ids)
    chosen = token_ids.clamp(min=0)
    return SamplerOutput(token_ids, gather_logprobs(raw, chosen, metadata.num_logprobs))


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of every row, the first of equals: `[n, vocab] -> [n]` int64; `NO_TOKEN`
    where all are -inf.

    The order of 16-bit logits is that of their fp32 values.
    """
    if logits.device.type == "cuda":
        from vllm.kernels.triton.sampling import argmax_rows

        return argmax_rows(logits)
    return best_tokens(logits)


def _draw(logits: Tensor, metadata: SamplingMetadata, positions: Tensor) -> Tensor:
    temperature, seeds = metadata.temperature, metadata.seeds
    if temperature is None or seeds is None:
        return greedy(logits)
    if logits.device.type == "cuda":
        from vllm.kernels.triton.sampling import gumbel_sample as draw
        from vllm.kernels.triton.token_filter import kept_tokens

        kept = None
        if (metadata.top_k, metadata.top_p, metadata.min_p) != (None, None, None):
            kept = kept_tokens(
                logits,
                temperature,
                metadata.top_k,
                metadata.top_p,
                metadata.min_p,
                top_p_alone=metadata.top_p_alone,
            )
        return draw(logits, temperature, seeds, positions, kept)
    divisor = temperature.masked_fill(temperature == 0, 1.0)
    scaled = logits.float() / divisor.unsqueeze(1)
    if metadata.min_p is not None:
        scaled = apply_min_p(scaled, metadata.min_p)
    scaled = apply_top_k_top_p(scaled, metadata.top_k, metadata.top_p)
    return gumbel_sample(scaled, temperature, seeds, positions)
