# SPDX-License-Identifier: Apache-2.0
"""One engine computes prompts, another answers them with the tokens of a single engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.distributed.kv_transfer.offload_engines import (
    core_of,
    drain,
    engine,
    prompt,
)
from tests.distributed.kv_transfer.p2p_engines import ask, await_release, hand_on, transfer
from vllm import LLM

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the nixl library is not installed"
)
CONNECTORS = ["P2pConnector", pytest.param("NixlConnector", marks=needs_nixl)]
#: within a block, at its end, at a chunk's end, over several chunks
LENGTHS = (2, 17, 65, 150)


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with engine(None) as llm:
        yield llm


@pytest.fixture(scope="module", params=CONNECTORS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    with ExitStack() as stack:
        first = stack.enter_context(engine(transfer("kv_producer", request.param)))
        second = stack.enter_context(engine(transfer("kv_consumer", request.param)))
        yield first, second


def tokens(llm: LLM, token_ids: list[int], **params: object) -> list[int]:
    return list(ask(llm, token_ids, 12, **params).outputs[0].token_ids)


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_one_engine(alone: LLM, pair: tuple[LLM, LLM], length: int) -> None:
    first, second = pair
    token_ids = prompt(length, length)
    params = hand_on(first, token_ids)
    assert params["remote_num_tokens"] == length - 1 and params["do_remote_prefill"]
    answer = ask(second, token_ids, 12, **params)
    assert list(answer.outputs[0].token_ids) == tokens(alone, token_ids)
    assert answer.num_cached_tokens == length - 1
    drain(first)
    drain(second)
    await_release(first)


def test_the_rest_of_a_conversation_comes(alone: LLM, pair: tuple[LLM, LLM]) -> None:
    first, second = pair
    turn = [*prompt(150, 150), *tokens(alone, prompt(150, 150)), *prompt(3, 40)]
    expected = tokens(alone, turn)
    assert tokens(second, turn, **hand_on(first, turn)) == expected
    longer = [*turn, *expected[:1], 9]
    answer = ask(second, longer, 12, **hand_on(first, longer))
    assert list(answer.outputs[0].token_ids) == tokens(alone, longer)
    assert answer.num_cached_tokens == len(longer) - 1
    drain(first)
    drain(second)
    await_release(first)


def test_what_arrived_is_used_in_the_next_step(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While state is on its way the core pauses between steps, and not once it has come."""
    first, second = pair
    core: Any = core_of(second)
    step, take_oldest, waits = core.step, core._in_flight.take_oldest, []

    def seen() -> Any:
        output, result = take_oldest()
        report = result.kv_connector_output
        waits.append([report is not None and bool(report.finished_recving)])
        return output, result

    def stepped() -> Any:
        produced = step()
        if waits and len(waits[-1]) == 1:
            waits[-1].append(core.only_waits)
        return produced

    monkeypatch.setattr(core._in_flight, "take_oldest", seen)
    monkeypatch.setattr(core, "step", stepped)
    tokens(second, prompt(70, 70), **hand_on(first, prompt(70, 70)))
    drain(second)
    assert [True, False] in waits, "the state came, and the next step is not put off"
    assert [True, True] not in waits


def test_a_prompt_of_one_token_has_nothing_to_hand_on(pair: tuple[LLM, LLM]) -> None:
    assert ask(pair[0], [7], 12, do_remote_decode=True).kv_transfer_params is None


def test_state_of_another_prompt_is_refused(
    pair: tuple[LLM, LLM], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    params = hand_on(first, prompt(31, 60))
    answer = ask(second, prompt(32, 60), 12, **params)
    assert answer.outputs[0].finish_reason == "error"
    assert "is of other tokens than this prompt" in caplog.text
    await_release(first)
    ended = ask(second, prompt(31, 60), 12, **params)
    assert ended.outputs[0].finish_reason == "error", "it was given up"


@pytest.mark.parametrize(
    ("role", "params", "message"),
    [
        (0, {"do_remote_prefill": True}, "this engine is a kv_producer"),
        (1, {"do_remote_decode": True}, "this engine is a kv_consumer"),
        (1, {"do_remote_prefill": True}, "remote_ports"),
        (1, {"do_remote_prefill": True, "do_remote_decode": True}, "do_remote_prefill and"),
    ],
)
def test_parameters_are_checked(
    pair: tuple[LLM, LLM], role: int, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(pair[role], prompt(1, 20), 4, **params)
