# SPDX-License-Identifier: Apache-2.0
"""Small engines in this process with host and file tiers, and what to do with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_model
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

MB = 2**20


def offloading(
    cpu_bytes: int = 16 * MB, root: Path | None = None, policy: str = "recompute", **tier: Any
) -> dict[str, Any]:
    """A `kv_transfer_config`; with `root` there are files behind the host memory."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": cpu_bytes}
    if root is not None:
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(root), **tier}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


@contextmanager
def engine(
    transfer: dict[str, Any] | None, family: str = "qwen3_5", **options: Any
) -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "disable_log_stats": False}
    settings |= {"kv_cache_memory_bytes": 16 * MB, "dtype": "float32"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(
            str(tiny_model(family)),
            kv_transfer_config=transfer,
            **{**settings, **options},
        )
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def prompt(seed: int, length: int) -> list[int]:
    return [(31 * seed + 7 * i + i * i * (seed + 3)) % 256 for i in range(length)]


def run(llm: LLM, *token_ids: list[int], max_tokens: int = 12) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=0)
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
    return llm.generate(batch, params, use_tqdm=False)


def bits(outputs: list[RequestOutput]) -> list[tuple[int, float]]:
    """Every token with its exact logprob."""
    return [
        (token, entry[token].logprob)
        for output in outputs
        for completion in output.outputs
        for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def history(output: RequestOutput) -> list[int]:
    assert output.prompt_token_ids is not None
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def connector_of(llm: LLM) -> Any:
    """The scheduler's side."""
    return core_of(llm).scheduler.connector


def worker_connector_of(llm: LLM) -> Any:
    return core_of(llm).executor.worker._connector_slot.connector


def drain(llm: LLM) -> None:
    """Let every transfer end."""
    while core_of(llm).has_work():
        llm.llm_engine.step()


def await_deletes(llm: LLM) -> None:
    """Files that are forgotten go by a thread that nobody waits for."""
    worker_connector_of(llm)._moves._writer.submit(int).result()


def metric(llm: LLM, name: str) -> float:
    """What `/metrics` would show for `vllm:kv_offload_<name>`."""
    full = f"vllm:kv_offload_{name}"
    return sum(found.value for found in llm.get_metrics() if found.name == full)


def evict_device(llm: LLM) -> None:
    """The device forgets everything; the tiers keep it."""
    drain(llm)
    assert llm.reset_prefix_cache()
