# SPDX-License-Identifier: Apache-2.0
"""Pairs of small engines in this process, one for prompts and one for answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.distributed.kv_transfer.fault_runs import wait_until
from tests.distributed.kv_transfer.offload_engines import worker_connector_of
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

MB = 2**20


def transfer(role: str, name: str = "P2pConnector", **extra: Any) -> dict[str, Any]:
    """A `kv_transfer_config`."""
    policy = extra.pop("policy", "fail")
    settings = {"host": "127.0.0.1", "port": 0, "staging_bytes": 4 * MB, "timeout_s": 5.0}
    return {
        "kv_connector": name,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {**settings, **extra},
    }


def ask(llm: LLM, prompt: Sequence[int], max_tokens: int, **params: Any) -> RequestOutput:
    """One request with these `kv_transfer_params`."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    [output] = llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], sampling, use_tqdm=False)
    return output


def hand_on(llm: LLM, prompt: Sequence[int], max_tokens: int = 12) -> dict[str, Any]:
    """Compute a prompt for another engine; what that one has to be told."""
    params = ask(llm, prompt, max_tokens, do_remote_decode=True).kv_transfer_params
    assert params is not None
    return params


def await_release(producer: LLM) -> None:
    """A consumer says that it needs a copy no more by a thread that no request waits for."""
    sender = worker_connector_of(producer)._sender
    wait_until(lambda: not sender._held and not sender._staging.used_bytes)
