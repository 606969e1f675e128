# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions` without streaming."""

import re
import threading

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, SENTENCE, FakeAsyncLLM, byte_ids
from vllm.entrypoints.openai import logprobs as lp
from vllm.entrypoints.openai import serving_engine
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.asyncio


async def complete(client: httpx.AsyncClient, status: int = 200, **body: object) -> dict:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_reply_has_every_key(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="hi", max_tokens=7)
    assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion"
    assert reply["model"] == "fake" and reply["created"] > 1_600_000_000
    assert reply["service_tier"] is None and reply["system_fingerprint"] is None
    assert reply["kv_transfer_params"] is None
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "Grüße"[:5],
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_counts_drafts(client: httpx.AsyncClient, n: int) -> None:
    """Of all completions together; the fake engine is told what it had."""
    told = {"vllm_xargs": {"drafted": [3, 5]}, "max_tokens": 4, "n": n}
    reply = await complete(client, prompt="hi", **told)
    expected = {"accepted_prediction_tokens": 3 * n, "rejected_prediction_tokens": 5 * n}
    assert reply["usage"]["completion_tokens_details"] == expected
    messages = [{"role": "user", "content": "hi"}]
    chat = await client.post("/v1/chat/completions", json={"messages": messages, **told})
    assert chat.json()["usage"]["completion_tokens_details"] == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[71, 72]]),
        ([5, 6, 258], [[5, 6, 258]]),
        (["h", "i"], [[71], [72]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_prompt_forms(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, prompt: object, expected: list[list[int]]
) -> None:
    reply = await complete(client, prompt=prompt, max_tokens=1, return_token_ids=True)
    assert [call.prompt["prompt_token_ids"] for call in engine.calls] == expected
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == expected
    assert [choice["token_ids"] for choice in reply["choices"]] == [[byte_ids("G")[0]]] * len(
        expected
    )


async def test_choices_of_several_prompts_are_numbered_through(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt=["a", "b"], n=2, max_tokens=1)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 2 and reply["usage"]["completion_tokens"] == 4


async def test_sampling_fields_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 4,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "bad_words": ["bad"],
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    await complete(client, prompt="hi", logit_bias={"5": 1.5}, **fields)
    params = engine.calls[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {5: 1.5}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


async def test_null_fields_take_defaults(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    nulls = dict.fromkeys(
        ["n", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "logprobs", "echo"]
        + ["stream", "priority", "min_tokens", "ignore_eos", "skip_special_tokens", "logit_bias"]
    )
    await complete(client, prompt="hi", **nulls)
    params = engine.calls[0].params
    assert (params.n, params.max_tokens, params.temperature, params.top_p) == (1, 16, 1.0, 1.0)
    assert engine.calls[0].kwargs["priority"] == 0


async def test_server_defaults_apply_to_unset_fields(
    engine: FakeAsyncLLM, make_client: MakeClient
) -> None:
    engine.model_config.sampling_defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    await complete(make_client(), prompt="hi", top_k=3)
    params = engine.calls[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 3, 5)


async def test_default_max_tokens_is_cut_to_the_context(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    await complete(client, prompt=[1] * (MAX_MODEL_LEN - 3))
    assert engine.calls[0].params.max_tokens == 3


@pytest.mark.parametrize(("length", "max_tokens"), [(MAX_MODEL_LEN, 1), (MAX_MODEL_LEN - 2, 3)])
async def test_too_long_is_refused(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, length: int, max_tokens: int
) -> None:
    reply = await complete(client, 400, prompt=[1] * length, max_tokens=max_tokens)
    assert reply["error"]["type"] == "BadRequestError"
    assert reply["error"]["message"].startswith("This model's maximum context length is 512")
    assert not engine.calls


async def test_longest_prompt_with_one_output_token(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt=[1] * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert reply["usage"]["total_tokens"] == MAX_MODEL_LEN


async def test_logprobs(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="hi", max_tokens=2, logprobs=2)
    assert reply["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["G", "r"],
        "top_logprobs": [{"G": -0.5, "H": -1.5}, {"r": -0.5, "s": -1.5}],
    }


async def test_alternatives_with_one_text_are_all_shown(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="\u00e9", max_tokens=0, echo=True, logprobs=3)
    scored = reply["choices"][0]["logprobs"]
    second = byte_ids("\u00e9")[1]
    expected = {"\ufffd": -0.5, f"token_id:{second + 1}": -1.5, f"token_id:{second + 2}": -2.5}
    assert scored["tokens"] == ["\ufffd", "\ufffd"]
    assert scored["top_logprobs"] == [None, expected]


async def test_infinite_logprobs_become_finite(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="hi", max_tokens=1, logprobs=5)
    assert reply["choices"][0]["logprobs"]["top_logprobs"][0]["K"] == -9999.0


async def test_echo_with_logprobs_scores_the_prompt(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    reply = await complete(client, prompt="hi", max_tokens=0, echo=True, logprobs=1)
    (choice,) = reply["choices"]
    assert choice["text"] == "hi" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"i": -0.5}]
    assert reply["usage"]["completion_tokens"] == 0
    assert engine.calls[0].params.prompt_logprobs == 1


async def test_echo_of_token_ids_and_output(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt=[71, 72], max_tokens=2, echo=True, logprobs=0)
    (choice,) = reply["choices"]
    assert choice["text"] == "hiGr"
    assert choice["logprobs"]["tokens"] == ["h", "i", "G", "r"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


HI = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 4}
COMPLETION = {"prompt": ["hi", "you"], "n": 2, "max_tokens": 4, "echo": True, "logprobs": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "prompt_logprobs": 1}),
        ("/v1/completions", {**COMPLETION, "max_tokens": 0}),
        ("/v1/completions", {**COMPLETION, "stream": True}),
        ("/v1/chat/completions", {**HI, "logprobs": True, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {**HI, "logprobs": True, "top_logprobs": 2, "stream": True}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {
            "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1}}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "stream": True, "sampling_params": {
            "max_tokens": 4, "logprobs": 2}}),
    ],
)  # fmt: skip
async def test_many_logprobs_are_shown_in_a_thread_and_look_the_same(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict
) -> None:
    threads = []
    token_text = lp.token_text

    def seen(*args: object) -> str:
        threads.append(threading.current_thread())
        return token_text(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(lp, "token_text", seen)
    replies = []
    for few in (serving_engine._FEW_LOGPROBS, 0):
        monkeypatch.setattr(serving_engine, "_FEW_LOGPROBS", few)
        reply = await client.post(path, json={**body, "request_id": "r"})
        assert reply.status_code == 200, reply.text
        replies.append(re.sub(r'"created":\d+', "", reply.text))
    assert replies[0] == replies[1] and "logprob" in replies[0]
    half = len(threads) // 2
    assert set(threads[:half]) == {threading.main_thread()}
    assert threading.main_thread() not in threads[half:] and len(threads) == 2 * half > 0


@pytest.mark.parametrize("skip", [True, False])
async def test_offsets_agree_with_an_echo_of_special_tokens(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, skip: bool
) -> None:
    """Each token begins at its offset, whether the text shows special tokens or not."""
    assert engine.tokenizer is not None
    start = engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    body = {"max_tokens": 3, "echo": True, "logprobs": 0, "skip_special_tokens": skip}
    reply = await complete(client, prompt=[start, *byte_ids("hü")], **body)
    choice = reply["choices"][0]
    shown = "" if skip else "<|im_start|>"
    assert choice["text"] == f"{shown}hüGrü"[: len(shown) + 4]
    width = len(shown)
    expected = [0, width, width + 1, width + 1, width + 2, width + 3, width + 4]
    assert choice["logprobs"]["text_offset"] == expected
    reply = await complete(client, prompt="<|im_start|>hü", **body)
    choice = reply["choices"][0]
    assert choice["text"] == "<|im_start|>hüGr"
    assert choice["logprobs"]["text_offset"] == [0, 12, 13, 13, 14, 15, 16]


@pytest.mark.parametrize("as_ids", [True, False])
async def test_offsets_count_the_text(client: httpx.AsyncClient, as_ids: bool) -> None:
    body = {"max_tokens": 6, "logprobs": 0, "return_tokens_as_token_ids": as_ids}
    (choice,) = (await complete(client, prompt="hi", **body))["choices"]
    assert choice["text"] == "Grüße"[:4] and choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 3]


async def test_tokens_as_token_ids(client: httpx.AsyncClient, make_client: MakeClient) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "logprobs": 1}
    expected = [f"token_id:{byte_ids('G')[0]}"]
    reply = await complete(client, **body, return_tokens_as_token_ids=True)
    assert reply["choices"][0]["logprobs"]["tokens"] == expected
    by_server = make_client(return_tokens_as_token_ids=True)
    assert (await complete(by_server, **body))["choices"][0]["logprobs"]["tokens"] == expected


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="hi", max_tokens=1, prompt_logprobs=2)
    first, second = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["72"] == {"logprob": -0.5, "rank": 1, "decoded_token": "i"}
    assert second["73"]["rank"] == 2


async def test_connector_parameters_go_both_ways(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    given = {"include_output_tokens": True, "nested": {"a": [1, None]}}
    reply = await complete(
        client, prompt="a", max_tokens=1, kv_transfer_params=given, vllm_xargs={"x": 1}
    )
    assert engine.calls[0].params.extra_args == {"kv_transfer_params": given, "x": 1}
    assert reply["kv_transfer_params"] == {"path": "/0", "got": given}


async def test_connector_parameters_of_every_choice(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "kv_transfer_params": {"x": 1}}
    reply = await complete(client, **body)
    assert reply["kv_transfer_params"] == {"path": ["/0", "/1"] * 2, "got": [{"x": 1}] * 4}


async def test_request_ids(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    header = {"X-Request-Id": "../a b/" + "c" * 200}
    reply = await client.post("/v1/completions", json={"prompt": ["a", "b"]}, headers=header)
    base = reply.json()["id"].removeprefix("cmpl-")
    assert base == "_a_b_" + "c" * 93
    assert [call.request_id for call in engine.calls] == [f"cmpl-{base}-0", f"cmpl-{base}-1"]
    body = {"prompt": "a", "request_id": "from-body"}
    reply = await client.post("/v1/completions", json=body, headers=header)
    assert reply.json()["id"] == "cmpl-from-body"


async def test_engine_arguments(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    await complete(client, prompt="hi", priority=-3, cache_salt="salt")
    kwargs = engine.calls[0].kwargs
    assert kwargs["priority"] == -3 and kwargs["cache_salt"] == "salt"


async def test_the_header_of_a_replica(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    for rank in ("0", "007", "1.5", "-1", "", "\xb2", "9" * 5000):
        headers = {"X-data-parallel-rank": rank.encode("latin-1")}
        reply = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        if rank[-1:] in ("0", "7"):
            assert engine.calls[-1].kwargs["data_parallel_rank"] == int(rank)
            continue
        assert reply.status_code == 400, rank
        assert reply.json()["error"]["param"] == "X-data-parallel-rank"


async def test_placements(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    for placement in ("all-gdn", ["gdn", "kda"], None):
        await complete(client, prompt="hi", placement=placement)
        assert engine.calls[-1].params.placement == placement


@pytest.mark.parametrize(("keep", "expected"), [(2, "lo"), (-1, "hello"), (5, "hello")])
async def test_truncation_keeps_the_end(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, keep: int, expected: str
) -> None:
    reply = await complete(
        client, prompt="hello", max_tokens=1, truncate_prompt_tokens=keep, echo=True
    )
    assert engine.calls[0].prompt["prompt_token_ids"] == byte_ids(expected)
    assert reply["choices"][0]["text"] == expected + "G"


async def test_truncation_side(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    for side, kept in (("left", "llo"), ("right", "hel"), (None, "llo")):
        body = {"truncate_prompt_tokens": 3, "truncation_side": side, "max_tokens": 1}
        await complete(client, prompt="hello", **body)
        assert engine.calls[-1].prompt["prompt_token_ids"] == byte_ids(kept)
    messages = [{"role": "user", "content": "hello"}]
    body = {"truncate_prompt_tokens": 20, "truncation_side": "right", "max_tokens": 1}
    reply = await client.post("/v1/chat/completions", json={"messages": messages, **body})
    assert reply.status_code == 200
    prompt = engine.calls[-1].prompt
    assert len(prompt["prompt_token_ids"]) == 20
    assert prompt["prompt"].startswith(engine.tokenizer.decode(prompt["prompt_token_ids"]))
    assert all(mark <= 20 for mark in prompt["cache_checkpoints"])


async def test_truncation_to_the_context_leaves_room(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    await complete(client, prompt=[1] * 600, max_tokens=12, truncate_prompt_tokens=-1)
    assert len(engine.calls[0].prompt["prompt_token_ids"]) == MAX_MODEL_LEN - 12


async def test_prompt_embeddings_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for body in ({}, {"prompt": "hi"}):
        reply = await client.post("/v1/completions", json={"prompt_embeds": "AAAA", **body})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == "prompt_embeds"
        assert "prompt embeddings are not supported; send `prompt`" in error["message"]


async def test_unknown_keys_are_ignored(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="hi", no_such_field={"a": 1})
    assert reply["choices"][0]["text"] == SENTENCE[:14]


async def test_render_shows_the_plan_without_generating(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    body = {"prompt": [[71, 72], [1, 2]], "max_tokens": 3, "temperature": 0, "priority": 4}
    first, second = (await client.post("/v1/completions/render", json=body)).json()
    assert first["token_ids"] == [71, 72] and second["token_ids"] == [1, 2]
    assert first["sampling_params"]["max_tokens"] == 3
    assert first["sampling_params"]["temperature"] == 0
    assert first["model"] == "fake" and first["priority"] == 4 and first["stream"] is False
    assert not engine.calls


async def test_without_tokenizer_only_ids_are_served(
    engine: FakeAsyncLLM, make_client: MakeClient
) -> None:
    engine.tokenizer = None
    client = make_client()
    reply = await complete(client, 400, prompt="hi", max_tokens=1)
    assert "--skip-tokenizer-init" in reply["error"]["message"]
    assert not engine.calls


async def test_large_bodies_are_parsed_in_a_thread(client: httpx.AsyncClient) -> None:
    reply = await complete(client, prompt="hi", max_tokens=1, padding="x" * 300_000)
    assert reply["choices"][0]["text"] == "G"
    reply = await complete(client, 400, prompt=["hi", 1], padding="x" * 300_000)
    assert reply["error"]["param"] == "prompt"
