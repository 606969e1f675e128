# SPDX-License-Identifier: Apache-2.0
"""The official client against the application."""

from __future__ import annotations

import openai
import pytest

from tests.entrypoints.conftest import MakeApi
from tests.entrypoints.fake_engine import FakeAsyncLLM

pytestmark = pytest.mark.asyncio

HI: list = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(make_api: MakeApi) -> openai.AsyncOpenAI:
    return make_api(api_key=["k"])


async def test_completion(api: openai.AsyncOpenAI) -> None:
    reply = await api.completions.create(
        model="fake", prompt=[71, 72], max_tokens=2, logprobs=1, extra_body={"return_token_ids": 1}
    )
    assert reply.choices[0].text == "Gr" and reply.usage.completion_tokens == 2
    assert reply.choices[0].logprobs.tokens == ["G", "r"]
    assert reply.choices[0].model_extra["prompt_token_ids"] == [71, 72]
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


async def test_completion_stream(api: openai.AsyncOpenAI) -> None:
    stream = await api.completions.create(
        model="fake",
        prompt="hi",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "Gr"
    assert chunks[-1].usage.total_tokens == 5


async def test_chat(api: openai.AsyncOpenAI) -> None:
    reply = await api.chat.completions.create(
        model="fake", messages=HI, max_completion_tokens=2, logprobs=True, top_logprobs=1
    )
    assert reply.choices[0].message.content == "Gr"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].logprobs.content[0].top_logprobs[0].token == "G"


async def test_chat_stream(api: openai.AsyncOpenAI) -> None:
    stream = await api.chat.completions.create(model="fake", messages=HI, max_tokens=2, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Gr"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_errors_map_to_the_clients_exceptions(
    api: openai.AsyncOpenAI, engine: FakeAsyncLLM
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await api.chat.completions.create(model="fake", messages=HI, temperature=3)
    assert bad.value.param == "temperature" and bad.value.type == "BadRequestError"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await api.completions.create(model="other", prompt="hi")
    with pytest.raises(openai.AuthenticationError):
        await api.with_options(api_key="wrong").models.list()
    engine.fail_after = 1
    stream = await api.completions.create(model="fake", prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="dead"):
        async for _ in stream:
            pass


async def test_models(api: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await api.models.list()] == ["fake", "alias"]
