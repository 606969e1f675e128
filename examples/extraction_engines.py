# SPDX-License-Identifier: Apache-2.0
"""Two ways to extract: an engine in this program, or a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)

#: Token ids of some samples -> the complete file of each, in their order.
Extract = Callable[[list[list[int]]], Iterator[Path]]


def extraction_config(layers: list[int], storage: Path) -> dict[str, Any]:
    """`LLM`'s arguments that turn extraction on; as JSON, the flags of `vllm serve`."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    }


def wait_until_complete(path: Path) -> Path:
    """Wait for the file's lock, if it still has one, and remove the lock."""
    if Path(f"{path}.lock").exists():
        load_hidden_states(path)
        cleanup_hidden_states(path, keep_hidden_states=True)
    if not path.exists():
        raise SystemExit(
            f"error: {path} is not there; a server's directory must have the same path here"
        )
    return path


@contextmanager
def local_engine(
    model: str, layers: list[int], storage: Path, **engine_args: Any
) -> Iterator[Extract]:
    """An engine in this program that stores below `storage`."""
    llm = LLM(
        model,
        # Pieces of text share no prefixes.
        enable_prefix_caching=False,
        **extraction_config(layers, storage),
        **engine_args,
    )
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def extract(token_ids: list[list[int]]) -> Iterator[Path]:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        for output in llm.generate(prompts, params, use_tqdm=False):
            if not output.kv_transfer_params:
                raise SystemExit("error: the engine could not store a sample; its log says why")
            yield wait_until_complete(Path(output.kv_transfer_params["hidden_states_path"]))

    try:
        yield extract
    finally:
        llm.llm_engine.shutdown()


@contextmanager
def remote_engine(url: str, in_flight: int) -> Iterator[Extract]:
    """A server at `url`, asked for `in_flight` samples at a time."""
    base = url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=base, timeout=600) as client:

        def one(token_ids: list[int]) -> Path:
            body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0}
            reply = _send(client, "POST", "/v1/completions", json={**body, "model": name})
            handle = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
            if handle is None:
                raise SystemExit(
                    f"error: {base} answered without hidden states; start it with "
                    "--speculative-config and --kv-transfer-config as docs/extraction.md shows"
                )
            return wait_until_complete(Path(handle))

        name = _send(client, "GET", "/v1/models")["data"][0]["id"]
        with ThreadPoolExecutor(in_flight) as pool:
            yield lambda token_ids: pool.map(one, token_ids)


def _send(client: httpx.Client, method: str, path: str, **options: Any) -> dict[str, Any]:
    try:
        reply = client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise SystemExit(f"error: no answer from {client.base_url}: {error}") from error
    if reply.status_code != 200:
        raise SystemExit(f"error: {path} answered {reply.status_code}: {reply.text}")
    result: dict[str, Any] = reply.json()
    return result
