# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines with drafters, and pairs that differ: they work, or the error says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kv_transfer.offload_engines import drain, engine, prompt
from tests.distributed.kv_transfer.p2p_engines import ask, await_release, hand_on, transfer
from tests.draft_models import TINY, mtp_tensors, with_mtp
from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import P2pConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
TOKENS = [*prompt(1, 40), *prompt(1, 27)]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with engine(None) as llm:
        return tokens(llm)


def tokens(llm: LLM, **params: Any) -> list[int]:
    return list(ask(llm, TOKENS, 16, **params).outputs[0].token_ids)


def small_model() -> dict[str, Any]:
    """Its window is a group that the target does not have."""
    draft = str(tiny_model("qwen3_sliding"))
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}


@pytest.mark.parametrize("sides", ["both", "producer", "consumer"])
def test_ngram_keeps_no_state(sides: str, expected: list[int]) -> None:
    first = {"speculative_config": NGRAM} if sides != "consumer" else {}
    second = {"speculative_config": NGRAM} if sides != "producer" else {}
    with (
        engine(transfer("kv_producer"), **first) as producer,
        engine(transfer("kv_consumer"), **second) as consumer,
    ):
        answer = ask(consumer, TOKENS, 16, **hand_on(producer, TOKENS))
        assert list(answer.outputs[0].token_ids) == expected
        assert answer.num_cached_tokens == len(TOKENS) - 1
        drain(consumer)
        drain(producer)
        await_release(producer)


def test_a_drafter_with_state_of_its_own_goes_along(expected: list[int]) -> None:
    """Its blocks are handed on with the target's, so that it drafts as in one engine."""
    options = {"speculative_config": small_model()}
    with engine(None, **options) as one:
        assert tokens(one) == expected
        alone = drafted(one)
    with (
        engine(transfer("kv_producer"), **options) as producer,
        engine(transfer("kv_consumer"), **options) as consumer,
    ):
        answer = ask(consumer, TOKENS, 16, **hand_on(producer, TOKENS))
        assert list(answer.outputs[0].token_ids) == expected
        assert answer.num_cached_tokens == len(TOKENS) - 1
        assert drafted(consumer)["accepted"] == alone["accepted"]


def drafted(llm: LLM) -> dict[str, float]:
    prefix, suffix = "vllm:spec_decode_num_", "_tokens"
    return {
        found.name.removeprefix(prefix).removesuffix(suffix): found.value
        for found in llm.get_metrics()
        if found.name.startswith(prefix) and found.name.endswith(suffix)
    }


class _ComparesNothingAhead(P2pConnector):
    """Of another author."""

    @classmethod
    def loads_drafter_rows(cls, kv_transfer_config: KVTransferConfig, num_ahead: int) -> bool:
        return num_ahead == 0


def test_heads_on_the_target_are_refused_at_the_start(tmp_path: Path) -> None:
    """Where a connector loads no rows of a drafter, or does not compare the token that a head's
    last row depends on. What does is taken, also by its flag."""
    target = with_mtp(tiny_model("qwen3_5"), tmp_path / "mtp", mtp_tensors(TINY))

    def config(transferred: dict[str, Any] | None = None, **options: Any) -> None:
        given = options if transferred is None else {"kv_transfer_config": transferred}
        EngineArgs(
            model=str(target),
            dtype="float32",
            max_model_len=128,
            speculative_config={"method": "mtp", "num_speculative_tokens": 2},
            **given,
        ).create_engine_config()

    other = {"kv_connector_module_path": __name__}
    for role in ("kv_consumer", "kv_both"):
        with pytest.raises(
            VLLMValidationError, match="mtp beside kv_connector _Comp.*not compare the token"
        ):
            config(transfer(role, _ComparesNothingAhead.__name__) | other)
        config(transfer(role))
    config(transfer("kv_producer", _ComparesNothingAhead.__name__) | other)
    config(kv_offloading_size=0.1)
    stored = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(VLLMValidationError, match="ExampleConnector.*does not load the rows of a"):
        config(stored)


# ---- engines that differ ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def producer() -> Iterator[LLM]:
    with engine(transfer("kv_producer")) as llm:
        yield llm


@pytest.mark.parametrize("max_model_len", [96, 512])
def test_the_longest_request_may_differ(
    max_model_len: int, producer: LLM, expected: list[int]
) -> None:
    """A block of recurrent state stands for a whole request."""
    params = hand_on(producer, TOKENS)
    with engine(transfer("kv_consumer"), max_model_len=max_model_len) as consumer:
        answer = ask(consumer, TOKENS, 16, **params)
        assert list(answer.outputs[0].token_ids) == expected
        assert answer.num_cached_tokens == len(TOKENS) - 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"speculative_config": "small"}, "keeps other state than this engine: drafter is {"),
        ({"dtype": "bfloat16"}, "dtype is 'torch.bfloat16' here and 'torch.float32' there"),
        ({"block_size": 32}, "state_groups[1].spec.block_size is 32 here and 16 there"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "hash_algorithm is 'sha256_cbor' here"),
        ({"seed": "7"}, "hash_seed is "),
    ],
)
def test_what_differs_is_named(
    producer: LLM,
    options: dict[str, Any],
    field: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if options.get("speculative_config") == "small":
        options = {"speculative_config": small_model()}
    if "seed" in options:
        monkeypatch.setenv("PYTHONHASHSEED", options["seed"])
        options = {}
    params = hand_on(producer, TOKENS)
    with engine(transfer("kv_consumer"), **options) as consumer:
        answer = ask(consumer, TOKENS, 4, **params)
        assert answer.outputs[0].finish_reason == "error"
    assert field in caplog.text
