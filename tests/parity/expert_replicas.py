# SPDX-License-Identifier: Apache-2.0
"""Engines of two replicas that share experts, and requests for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from parity_checks import assert_equals_reference
from tiny_models import tiny_model

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.config.speculative import DRAFTS_KEY
from vllm.utils import start_method

FAMILY = "qwen3_5_moe"


def make(family: str = FAMILY, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "model": str(tiny_model(family)),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 * 2**20,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
    }
    return LLM(**{**settings, **options})


@contextmanager
def forked_replicas() -> Iterator[Callable[..., LLM]]:
    """`make`; its processes are forked from this one, its engines are shut down at the end."""
    made: list[LLM] = []

    def keep(*args: Any, **options: Any) -> LLM:
        made.append(make(*args, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setattr(start_method, "_other_threads", list)
        yield keep
        for one in made:
            one.llm_engine.engine_core.shutdown()


class Traffic:
    """Requests that are given to a replica each, and what came of them."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.outputs: dict[str, RequestOutput] = {}
        self.lengths: dict[str, int] = {}

    def add(
        self, rank: int, prompt: list[int], max_tokens: int, drafts: list[int] | None = None
    ) -> str:
        name = f"r{len(self.lengths)}-{rank}"
        extra = None if drafts is None else {DRAFTS_KEY: drafts}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, extra_args=extra
        )
        prompted = TokensPrompt(prompt_token_ids=prompt)
        self.engine.add_request(name, prompted, params, data_parallel_rank=rank)
        self.lengths[name] = max_tokens
        return name

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])
        del self.lengths[name]

    def run(self, num_messages: int | None = None) -> None:
        """Until all have ended, or so many messages have come."""
        count = 0
        while self.engine.has_unfinished_requests() and (
            num_messages is None or count < num_messages
        ):
            self.outputs.update((one.request_id, one) for one in self.engine.step())
            count += 1

    def check(self, family: str = FAMILY) -> None:
        for name, length in self.lengths.items():
            assert_equals_reference(self.outputs[name], tiny_model(family), length)
