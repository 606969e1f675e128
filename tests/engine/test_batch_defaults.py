# SPDX-License-Identifier: Apache-2.0
"""How many sequences and tokens a step holds when nobody says so."""

from __future__ import annotations

import pytest

from vllm.engine.batch_defaults import UsageContext, batch_limits
from vllm.platforms.cuda import CudaPlatform, GpuFacts


class _Gpu(CudaPlatform):
    def __init__(self, gib: int) -> None:
        self.facts = GpuFacts("GPU-0", "gpu", gib * 2**30, (9, 0))

    def total_memory_bytes(self, device_id: int = 0) -> int:
        return self.facts.total_bytes


SERVER, OFFLINE = UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS


@pytest.mark.parametrize(
    ("gib", "usage", "tokens", "seqs"),
    [
        (80, SERVER, 8192, 1024),
        (80, OFFLINE, 16384, 1024),
        (70, SERVER, 8192, 1024),
        (24, SERVER, 2048, 256),
        (24, OFFLINE, 8192, 256),
    ],
)
def test_batch_defaults(gib: int, usage: UsageContext, tokens: int, seqs: int) -> None:
    limits = batch_limits(
        None, None, max_model_len=4096, chunked_prefill=True, usage=usage, platform=_Gpu(gib)
    )
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("tokens", "seqs", "length", "chunked", "per_request", "result"),
    [
        (None, None, 4096, False, 1, (4096, 256)),
        (None, None, 4, True, 1, (1024, 256)),
        (16, None, 4096, True, 1, (16, 16)),
        (16, None, 4096, True, 2, (16, 8)),
        (1, None, 4096, True, 2, (1, 1)),
        (None, 3000, 4096, True, 1, (3000, 3000)),
        (None, 3000, 4096, True, 2, (6000, 3000)),
        (100, 50, 4096, True, 2, (100, 50)),
    ],
)
def test_batch_limits_fit_each_other(
    tokens: int | None,
    seqs: int | None,
    length: int,
    chunked: bool,
    per_request: int,
    result: tuple[int, int],
) -> None:
    limits = batch_limits(
        tokens,
        seqs,
        max_model_len=length,
        chunked_prefill=chunked,
        usage=SERVER,
        platform=_Gpu(24),
        tokens_per_request=per_request,
    )
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == result
