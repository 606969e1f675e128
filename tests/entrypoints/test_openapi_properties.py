# SPDX-License-Identifier: Apache-2.0
"""Whatever our own OpenAPI schema allows, and much that it forbids, never makes a 5xx."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.entrypoints.fake_engine import FakeAsyncLLM
from tests.nightly import nightly
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs

if TYPE_CHECKING:
    import schemathesis

pytestmark = pytest.mark.slow

#: of each operation, then in a nightly run
EXAMPLES = [12, *nightly(60)]
OPERATIONS = {
    "GET /health", "GET /ping", "POST /ping", "GET /version", "GET /load", "GET /metrics",
    "GET /decisions", "GET /experts", "GET /v1/models", "GET /v1/models/{name}",
    "POST /v1/completions", "POST /v1/completions/render", "POST /v1/chat/completions",
    "POST /v1/chat/completions/render", "POST /tokenize", "POST /detokenize",
    "POST /inference/v1/generate", "POST /abort_requests", "POST /sleep", "POST /wake_up",
    "GET /is_sleeping", "POST /collective_rpc", "POST /reset_prefix_cache", "GET /server_info",
    "GET /get_world_size", "GET /placements", "POST /placements",
}  # fmt: skip
#: what random bodies hardly ever get right, so that the rest of them is looked at
VALID = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "tokens": [71, 72]}
VALID |= {"token_ids": [71, 72], "sampling_params": {"max_tokens": 3}}

quick = functools.partial(
    settings,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def make_app() -> FastAPI:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        return build_app(FakeAsyncLLM(), FrontEndArgs())  # type: ignore[arg-type]


LABELS = sorted(
    f"{method.upper()} {path}"
    for path, methods in make_app().openapi()["paths"].items()
    for method in methods
)


@functools.cache
def operations(*modes: str) -> dict[str, st.SearchStrategy]:
    """Requests to each operation; schemathesis, which takes seconds, is imported here."""
    schemathesis = pytest.importorskip("schemathesis", reason="part of the test extra")
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())
    found = [result.ok() for result in schema.get_all_operations()]
    kinds = [schemathesis.GenerationMode[mode] for mode in modes]
    return {
        operation.label: st.one_of(*(operation.as_strategy(kind) for kind in kinds))
        for operation in found
    }


def test_the_schema_names_every_route() -> None:
    assert set(LABELS) >= OPERATIONS
    assert sorted(operations("POSITIVE", "NEGATIVE")) == LABELS


def check(case: schemathesis.Case) -> int:
    if isinstance(case.body, dict):
        # The stand-in engine has no beams; tests/e2e/test_server.py asks for them.
        case.body.pop("use_beam_search", None)
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 8)  # thousands of choices are allowed, but slow
    reply = case.call()
    status = int(reply.status_code)
    assert status < 500, (status, reply.text, case.body)
    if status >= 400:
        assert reply.json()["error"]["message"]
    return status


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("label", LABELS)
def test_no_server_error(label: str, examples: int) -> None:
    @quick(max_examples=examples)
    @given(case=operations("POSITIVE", "NEGATIVE")[label])
    def run(case: schemathesis.Case) -> None:
        check(case)

    run()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(
    "label", sorted(o for o in OPERATIONS if o.startswith(("POST /v1", "POST /inference")))
)
def test_no_server_error_past_the_prompt(label: str, examples: int) -> None:
    statuses = set()

    @quick(max_examples=examples)
    @given(case=operations("POSITIVE")[label])
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            given_keys = case.body.keys() & VALID.keys()
            case.body |= {key: VALID[key] for key in given_keys}
            case.body.pop("model", None)
        statuses.add(check(case))

    run()
    assert 200 in statuses
