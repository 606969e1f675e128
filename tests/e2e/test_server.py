# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface of a real server with a tiny model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import time
from pathlib import Path

import httpx
import pytest

from benchmarks import hostile_clients
from tests.e2e.conftest import MAX_MODEL_LEN, THREE_PROCESSES
from tests.e2e.remote_server import RemoteServer
from tests.entrypoints.bad_input import bad_requests
from tests.nightly import nightly
from tests.tiny_models import VOCAB_SIZE, hf_reference_generate, tiny_model
from vllm import LLM
from vllm.entrypoints.cli.main import main
from vllm.sampling_params import BeamSearchParams

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROMPT = [10, 20, 30, 40, 50, 60, 70]
HI = [{"role": "user", "content": "hi"}]


def family_of(server: RemoteServer) -> str:
    return server.model.rsplit("/", 1)[-1].removesuffix("-float32")


def test_greedy_tokens_equal_transformers(server: RemoteServer) -> None:
    reply = server.post(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    choice = reply["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT
    expected = hf_reference_generate(tiny_model(family_of(server)), PROMPT, 24)
    assert choice["token_ids"] == expected
    assert choice["finish_reason"] == "length"


def test_stream_equals_reply(server: RemoteServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", **body, logprobs=2)["choices"][0]
    client = server.client()
    text, tokens = "", []
    extra = {"ignore_eos": True}
    body = {k: v for k, v in body.items() if k != "ignore_eos"}
    for chunk in client.completions.create(
        model="tiny", **body, logprobs=2, stream=True, extra_body=extra
    ):
        text += chunk.choices[0].text
        tokens += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert text == whole["text"] and tokens == whole["logprobs"]["tokens"]


def streamed_text(server: RemoteServer, path: str, body: dict) -> str:
    text = ""
    with server.http.stream("POST", path, json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"] if "text" in choice else choice["delta"]["content"]
    return text


@pytest.mark.parametrize(
    "prompt", ["Größe — naïve", "日本語と中文", "नमस्ते दुनिया", "👩‍👩‍👧 🏳️‍🌈 שלום"]
)
def test_streamed_text_equals_the_reply_byte_for_byte(server: RemoteServer, prompt: str) -> None:
    """A random model's bytes are mostly no whole characters, which is the hard case."""
    body = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    completion = {**body, "prompt": prompt, "echo": True}
    chat = {**body, "messages": [{"role": "user", "content": prompt}]}
    whole = server.post("/v1/completions", **completion)["choices"][0]["text"]
    assert streamed_text(server, "/v1/completions", completion) == whole
    (choice,) = server.post("/v1/chat/completions", **chat)["choices"]
    assert streamed_text(server, "/v1/chat/completions", chat) == choice["message"]["content"]
    middle = whole[len(prompt) :][4:7]
    completion["stop"] = [middle]
    stopped = server.post("/v1/completions", **completion)["choices"][0]
    assert stopped["stop_reason"] == middle
    assert streamed_text(server, "/v1/completions", completion) == stopped["text"]


def test_seeded_sampling_repeats(server: RemoteServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "seed": 5, "n": 3, "return_token_ids": True}
    first, second = (server.post("/v1/completions", **body)["choices"] for _ in range(2))
    ids = [choice["token_ids"] for choice in first]
    assert ids == [choice["token_ids"] for choice in second]
    assert len({tuple(one) for one in ids}) == 3


def test_many_prompts_equal_single_ones(server: RemoteServer) -> None:
    prompts = [[i + 1, 2 * i + 1, 3] for i in range(6)]
    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    together = server.post("/v1/completions", prompt=prompts, **body)["choices"]
    for choice, prompt in zip(together, prompts, strict=True):
        alone = server.post("/v1/completions", prompt=prompt, **body)["choices"][0]
        assert choice["token_ids"] == alone["token_ids"]


def test_prompt_scoring(server: RemoteServer) -> None:
    reply = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=1
    )
    logprobs = reply["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(PROMPT)
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    positions = reply["choices"][0]["prompt_logprobs"]
    for token, position, shown in zip(
        PROMPT[1:], positions[1:], logprobs["token_logprobs"][1:], strict=True
    ):
        assert position[str(token)]["logprob"] == shown


def test_chat_through_the_official_client(server: RemoteServer) -> None:
    client = server.client()
    reply = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].message.content
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 3
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == content
    assert chunks[-1].usage == reply.usage or (
        chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
    )


def test_stop_strings(server: RemoteServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", **body)["choices"][0]["text"]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    choice = server.post("/v1/completions", **body, stop=[stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


def test_context_limit(server: RemoteServer) -> None:
    body = {"prompt": [7] * (MAX_MODEL_LEN - 1), "max_tokens": 1, "temperature": 0}
    reply = server.post("/v1/completions", **body)
    assert reply["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_every_bad_request_is_refused(server: RemoteServer) -> None:
    """The same table as for the fake engine, now with the engine's own checks."""
    wrong = []
    for case in bad_requests(MAX_MODEL_LEN, VOCAB_SIZE):
        reply = server.http.post(case.path, content=case.body, headers=dict(case.headers))
        error = reply.json().get("error", {})
        ok = reply.status_code == case.status and case.words in error.get("message", "")
        if case.param is not None:
            ok = ok and error.get("param") == case.param
        if not ok:
            wrong.append((case.name, reply.status_code, error))
    assert not wrong
    assert server.post("/v1/completions", prompt="hi", max_tokens=1)["choices"]


def metric(server: RemoteServer, name: str) -> float:
    text = server.http.get("/metrics").text
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return sum(map(float, found))


def test_beams_over_http_are_those_of_the_library(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(server.model, dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20)
    search = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5)
    expected = [
        [sequence.tokens[len(prompt) :] for sequence in output.sequences]
        for prompt, output in zip(
            [PROMPT, PROMPT[2:]],
            llm.beam_search([{"prompt_token_ids": p} for p in (PROMPT, PROMPT[2:])], search),
            strict=True,
        )
    ]
    llm.shutdown()
    body = {"use_beam_search": True, "n": 3, "max_tokens": 6, "return_token_ids": True}
    reply = server.post("/v1/completions", prompt=[PROMPT, PROMPT[2:]], length_penalty=0.5, **body)
    found = [choice["token_ids"] for choice in reply["choices"]]
    assert found == [*expected[0], *expected[1]]
    assert reply["usage"]["completion_tokens"] == sum(map(len, found))
    assert all(choice["text"] for choice in reply["choices"])
    chat = server.post("/v1/chat/completions", messages=HI, **body)
    assert len(chat["choices"]) == 3 and len({c["message"]["content"] for c in chat["choices"]}) > 1
    for field, value in (("top_k", 5), ("stop", "x"), ("response_format", {"type": "json_object"})):
        error = server.post("/v1/completions", 400, prompt=PROMPT, **body, **{field: value})[
            "error"
        ]
        assert "beam" in error["message"]


def test_metrics_count(server: RemoteServer) -> None:
    before = metric(server, "vllm:generation_tokens_total")
    server.post("/v1/completions", prompt=PROMPT, max_tokens=5, ignore_eos=True)
    assert metric(server, "vllm:generation_tokens_total") == before + 5
    assert metric(server, "vllm:num_requests_running") == 0


def test_the_blocks_of_the_metrics_are_the_capacity_of_the_log(server: RemoteServer) -> None:
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", server.http.get("/metrics").text, re.M)
    assert info is not None
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info.group(1)))
    logged = re.search(r"state memory: (\d+) tokens", server.log())
    assert logged is not None
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == int(logged.group(1)) > 0


@pytest.mark.parametrize("streaming", [True, False])
def test_leaving_aborts_in_the_engine(server: RemoteServer, streaming: bool) -> None:
    before = metric(server, "vllm:generation_tokens_total")
    body = {"prompt": ["a", "b"], "max_tokens": 4000, "ignore_eos": True, "stream": streaming}
    with httpx.Client(timeout=0.5) as client, contextlib.suppress(httpx.ReadTimeout):
        with client.stream("POST", server.url + "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
    deadline = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metric(server, "vllm:num_requests_running") == 0
    assert server.get("/load") == {"server_load": 0}
    assert metric(server, "vllm:generation_tokens_total") - before < 2 * 4000


def test_many_clients(server: RemoteServer) -> None:
    def ask(i: int) -> tuple[int, int]:
        body = {"prompt": [i + 1, i + 2], "max_tokens": 1 + i % 7, "ignore_eos": True}
        reply = server.post("/v1/completions", **body)
        return reply["usage"]["completion_tokens"], 1 + i % 7

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for got, expected in pool.map(ask, range(48)):
            assert got == expected


def test_models_and_decisions(server: RemoteServer) -> None:
    models = server.get("/v1/models")["data"]
    assert [model["id"] for model in models] == ["tiny", "alias"]
    assert models[0]["root"] == server.model and models[0]["max_model_len"] == MAX_MODEL_LEN
    whats = {decision["what"] for decision in server.get("/decisions")}
    assert {"platform", "enable_prefix_caching", "attention backend"} <= whats


def test_render_matches_generation(server: RemoteServer) -> None:
    rendered = server.post("/v1/chat/completions/render", messages=HI)
    reply = server.post("/v1/chat/completions", messages=HI, max_tokens=1, return_token_ids=True)
    assert rendered["token_ids"] == reply["prompt_token_ids"]
    text = server.post("/detokenize", tokens=rendered["token_ids"])["prompt"]
    again = server.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert again == rendered["token_ids"]


def test_bench_serve_counts_what_the_server_did(server: RemoteServer, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    load = ["--num-prompts", "8", "--random-input-len", "20", "--random-output-len", "6"]
    saved = ["--save-detailed", "--result-filename", str(path), "--disable-tqdm"]
    assert main(["bench", "serve", "--base-url", server.url, "--ignore-eos", *load, *saved]) == 0
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (8, 0, "tiny")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (160, 48)
    assert result["output_lens"] == [6] * 8
    # A slow machine may read a whole reply at once: its first token is then its last.
    assert 0 < result["mean_ttft_ms"] <= result["mean_e2el_ms"]


@pytest.mark.parametrize("server", ["llama", *nightly("qwen3_5", THREE_PROCESSES)], indirect=True)
def test_hostile_clients_do_not_keep_others_waiting(server: RemoteServer) -> None:
    """`python -m benchmarks.hostile_clients` for a minute does the same; a busy machine gets more
    than one try, and more time for an answer to each kind."""
    answered: set[str] = set()
    for attempt in range(3):
        outcome = hostile_clients.run(server.url, seconds=5 * 3**attempt, seed=attempt)
        assert not outcome.replies.wrong
        answered |= outcome.replies.seconds.keys()
        kinds = {attack.name for attack in hostile_clients.attacks(0)}
        if answered == kinds and outcome.ratio <= hostile_clients.LIMIT:
            return
    assert answered == kinds
    pytest.fail(f"the first token came {outcome.ratio:.1f} times later")
