# SPDX-License-Identifier: Apache-2.0
"""Batch limits where the user set none."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm import decisions
from vllm.platforms.interface import Platform


class UsageContext(str, enum.Enum):
    """Who builds the engine: offline use prefers throughput, a server short steps."""

    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"

    @property
    def is_offline(self) -> bool:
        return self in (UsageContext.LLM_CLASS, UsageContext.OPENAI_BATCH_RUNNER)


@dataclass(frozen=True)
class BatchLimits:
    """Tokens and requests of one step."""

    max_num_batched_tokens: int
    max_num_seqs: int


_LARGE_GPU_BYTES = 70 * 2**30
#: (large device, offline) -> tokens per step
_TOKENS = {
    (True, False): 8192,
    (True, True): 16384,
    (False, False): 2048,
    (False, True): 8192,
}
_SEQS = {True: 1024, False: 256}


def batch_limits(
    tokens: int | None,
    seqs: int | None,
    *,
    max_model_len: int,
    chunked_prefill: bool,
    usage: UsageContext,
    platform: Platform,
    tokens_per_request: int = 1,
) -> BatchLimits:
    """Fill the limits that are None; given ones are kept as they are.

    `tokens_per_request`: tokens a decoding request has in a step, 1 plus its draft tokens.
    Without chunked prefill a step must hold the longest prompt. Tokens that `max_num_seqs`
    sequences of full length could never use are not reserved.
    """
    large = platform.is_cuda() and platform.total_memory_bytes() >= _LARGE_GPU_BYTES
    device = "70 GiB or more" if large else "less than 70 GiB"
    where = "offline" if usage.is_offline else "server"
    if seqs is None:
        seqs = _SEQS[large]
        why = f"default for a device of {device}" if platform.is_cuda() else "default for a CPU"
        if tokens is not None and tokens < seqs * tokens_per_request:
            seqs = max(1, tokens // tokens_per_request)
            why = f"what --max-num-batched-tokens {tokens} holds"
        decisions.record("max_num_seqs", seqs, why)
    if tokens is None:
        tokens, why = _TOKENS[large, usage.is_offline], f"default ({where}, {device})"
        most = max(1, seqs) * max_model_len  # a bad --max-num-seqs is reported as such
        if tokens > most:
            tokens, why = most, "no batch can be larger"
        if tokens < seqs * tokens_per_request:
            tokens = seqs * tokens_per_request
            why = "what --max-num-seqs decoding requests need"
        if not chunked_prefill and tokens < max_model_len:
            tokens, why = max_model_len, "prompts are not split, so a step holds the longest one"
        decisions.record("max_num_batched_tokens", tokens, why)
    return BatchLimits(tokens, seqs)
