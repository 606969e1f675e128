# SPDX-License-Identifier: Apache-2.0
"""Every bad request gets a clear 4xx that names its field, and leaves the server working."""

import httpx
import pytest

from tests.entrypoints.bad_input import ENGINE_CHECKS, BadRequest, bad_requests
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeAsyncLLM

pytestmark = pytest.mark.asyncio

CASES = [c for c in bad_requests(MAX_MODEL_LEN, VOCAB_SIZE) if c.name not in ENGINE_CHECKS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_refused(client: httpx.AsyncClient, engine: FakeAsyncLLM, case: BadRequest) -> None:
    reply = await client.post(case.path, content=case.body, headers=dict(case.headers))
    assert reply.status_code == case.status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == case.status and error["message"] and case.words in error["message"]
    assert len(error["message"]) < 2000
    if case.param is not None:
        assert error["param"] == case.param
    assert not engine.calls
    good = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
    assert good.status_code == 200


async def test_body_limit(make_client, engine: FakeAsyncLLM) -> None:
    client = make_client(max_request_body_size=1000)
    body = b'{"prompt": "' + b"a" * 1000 + b'"}'
    headers = {"content-type": "application/json"}
    declared = await client.post("/v1/completions", content=body, headers=headers)

    async def chunks():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    counted = await client.post("/v1/completions", content=chunks(), headers=headers)
    for reply in (declared, counted):
        assert reply.status_code == 413
        assert "--max-request-body-size" in reply.json()["error"]["message"]
    assert not engine.calls
    assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


async def test_wrong_method_is_an_error_object(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/completions")
    assert reply.status_code == 405 and reply.json()["error"]["code"] == 405
    assert reply.headers["allow"] == "POST"


async def test_unexpected_failure_hides_its_cause(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    engine.fail_after, engine.error = 0, RuntimeError("secret path /root/x")
    reply = await client.post("/v1/completions", json={"prompt": "hi"})
    assert reply.status_code == 500 and "secret" not in reply.text
    assert reply.json()["error"]["type"] == "InternalServerError"
