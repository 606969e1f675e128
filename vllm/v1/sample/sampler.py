# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, on the device."""

from __future__ import annotations

from torch import Tensor

from vllm.kernels.sampling import DrawProblem
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.adjusted_rows import AdjustedRows
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.token_masks import TokenMasks


def sample(
    logits: Tensor,
    metadata: SamplingMetadata,
    positions: Tensor,
    adjusted: AdjustedRows | None = None,
    masks: TokenMasks | None = None,
) -> SamplerOutput:
    """Sample one token per row of `logits [n, vocab]` (may change in place).

    `positions [n]` int64: sequence position the sampled token will take. `adjusted`: the rows that
    have adjustments; who knows what is output tells them. A row of which adjustments and `masks`
    leave nothing samples `NO_TOKEN`. Logprobs are those of the unprocessed logits.
    """
    raw, keep = logits, metadata.num_logprobs is not None
    if adjusted is not None:
        logits = adjusted.change(logits, positions, keep)
    if masks is not None:
        if keep and logits is raw:
            logits = raw.clone()
        masks.apply(logits)
    token_ids = _draw(logits, metadata, positions)
    if metadata.num_logprobs is None:
        return SamplerOutput(token_ids)
    chosen = token_ids.clamp(min=0)
    return SamplerOutput(token_ids, gather_logprobs(raw, chosen, metadata.num_logprobs))


def gather_logprobs(logits: Tensor, chosen: Tensor, num_logprobs: int) -> LogprobsTensors:
    """`logits [n, vocab]` (unprocessed), `chosen [n]` int64 -> rows of chosen + top k."""
    kernels = current_platform.kernels
    return LogprobsTensors(*kernels.ranked_logprobs(logits, chosen, num_logprobs))


def _draw(logits: Tensor, metadata: SamplingMetadata, positions: Tensor) -> Tensor:
    if metadata.temperature is None or metadata.seeds is None:
        return current_platform.kernels.argmax_rows(logits)
    problem = DrawProblem(
        logits,
        metadata.temperature,
        metadata.seeds,
        positions,
        metadata.top_k,
        metadata.top_p,
        metadata.min_p,
        metadata.top_p_alone,
    )
    return current_platform.kernels.draw_tokens(problem)
