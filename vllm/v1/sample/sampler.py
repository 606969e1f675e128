# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, on the device."""

from __future__ import annotations

from torch import Tensor

from vllm.kernels.sampling import DrawProblem
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.adjusted_rows import AdjustedRows
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sharded_sampler import draw_sharded, logprobs_sharded
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.sample.vocab_shard import VocabShard


def sample(
    logits: Tensor,
    metadata: SamplingMetadata,
    positions: Tensor,
    adjusted: AdjustedRows | None = None,
    masks: TokenMasks | None = None,
    shard: VocabShard | None = None,
) -> SamplerOutput:
    """Sample one token per row of `logits [n, vocab]` (may change in place); with a `shard`, of
    which each rank has a part, `[n, shard.width]`.

    `positions [n]` int64: sequence position the sampled token will take. `adjusted`: the rows that
    have adjustments; who knows what is output tells them. A row of which adjustments and `masks`
    leave nothing samples `NO_TOKEN`. Logprobs are those of the unprocessed logits.
    """
    first = 0 if shard is None else shard.first
    changes = shard is None or shard.size > 0
    logits = logits if shard is None else shard.own(logits)
    raw, keep = logits, metadata.num_logprobs is not None
    if adjusted is not None and changes:
        logits = adjusted.change(logits, positions, keep, first)
    if masks is not None and changes:
        if keep and logits is raw:
            logits = raw.clone()
        masks.apply(logits, first)
    token_ids = _draw(logits, metadata, positions, shard)
    if metadata.num_logprobs is None:
        return SamplerOutput(token_ids)
    chosen = token_ids.clamp(min=0)
    if shard is None:
        return SamplerOutput(token_ids, gather_logprobs(raw, chosen, metadata.num_logprobs))
    told = logprobs_sharded(raw, chosen, metadata.num_logprobs, shard)
    return SamplerOutput(token_ids, told)


def gather_logprobs(
    logits: Tensor, chosen: Tensor, num_logprobs: int, shard: VocabShard | None = None
) -> LogprobsTensors:
    """`logits [n, vocab]` (unprocessed), `chosen [n]` int64 -> rows of chosen + top k. With a
    `shard` each rank has `[n, shard.width]` of them."""
    if shard is not None:
        return logprobs_sharded(shard.own(logits), chosen, num_logprobs, shard)
    kernels = current_platform.kernels
    return LogprobsTensors(*kernels.ranked_logprobs(logits, chosen, num_logprobs))


def _draw(
    logits: Tensor, metadata: SamplingMetadata, positions: Tensor, shard: VocabShard | None
) -> Tensor:
    if shard is not None:
        return draw_sharded(logits, metadata, positions, shard)
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
