# SPDX-License-Identifier: Apache-2.0
"""Requests that must be refused: one table for the fake engine and for a real server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class BadRequest:
    """`param` is the expected `error.param`, None when the whole body is at fault; `words` must
    appear in the message."""

    name: str
    path: str
    body: bytes
    param: str | None = None
    words: str = ""
    status: int = 400
    headers: tuple[tuple[str, str], ...] = tuple(JSON.items())


def _completion(name: str, param: str | None, words: str = "", status: int = 400, **body: Any):
    body = {"prompt": "hi", "max_tokens": 4, **body}
    data = json.dumps(body).encode()
    return BadRequest(name, "/v1/completions", data, param, words, status)


def _chat(name: str, param: str | None, words: str = "", status: int = 400, **body: Any):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
    data = json.dumps(body).encode()
    return BadRequest(name, "/v1/chat/completions", data, param, words, status)


def _response(name: str, param: str, words: str = "", **body: Any):
    data = json.dumps({"input": "hi", **body}).encode()
    return BadRequest(name, "/v1/responses", data, param, words)


def _tokens(name: str, field: str, value: Any) -> BadRequest:
    data = json.dumps({"token_ids": [1, 2], "sampling_params": {field: value}}).encode()
    words = "filled in by the engine"
    return BadRequest(name, "/inference/v1/generate", data, "sampling_params", words)


def _raw(name: str, data: bytes, words: str = "", **fields: Any) -> BadRequest:
    return BadRequest(name, "/v1/completions", data, None, words, **fields)


_DEEP = b"[" * 100_000 + b"]" * 100_000
_IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
_BAD_OBJECT = {"type": "object", "properties": {"a": {"type": "whole"}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def bad_requests(max_model_len: int, vocab_size: int) -> list[BadRequest]:
    """The table, for a server with this context length and vocabulary."""
    return [
        _raw("not json", b"{nope"),
        _raw("empty body", b""),
        _raw("json null", b"null"),
        _raw("json list", b"[1]"),
        _raw("invalid utf-8", b'{"prompt": "\xff\xfe"}'),
        _raw("lone surrogate", b'{"prompt": "\\ud800"}'),
        _raw("nested absurdly", _DEEP),
        _raw("nested prompt", b'{"prompt": ' + _DEEP + b"}"),
        _raw("nested extra", b'{"prompt": "a", "kv_transfer_params": {"a": ' + _DEEP + b"}}"),
        _raw("form", b"prompt=hi", "application/json",
             headers=(("content-type", "application/x-www-form-urlencoded"),)),
        _raw("text", b'{"prompt": "hi"}', "application/json",
             headers=(("content-type", "text/plain"),)),
        BadRequest("no prompt", "/v1/completions", b"{}", "prompt"),
        _completion("mark type", "cache_checkpoints.0", "integer", cache_checkpoints=["a"]),
        _chat("mark name", "cache_checkpoints", "'messages'", cache_checkpoints="turns"),
        _completion("many marks", "cache_checkpoints", "0", cache_checkpoints=list(range(5000))),
        _completion("prompt null", "prompt", prompt=None),
        _completion("prompt number", "prompt", prompt=3),
        _completion("prompt object", "prompt", prompt={"a": 1}),
        _completion("prompt mixed", "prompt", prompt=["a", 1]),
        _completion("prompt nested mixed", "prompt", prompt=[[1], "a"]),
        _completion("prompt floats", "prompt", prompt=[1.5, 2.5]),
        _completion("prompt booleans", "prompt", prompt=[True, False]),
        _completion("prompt empty list", "prompt", prompt=[]),
        _completion("prompt empty ids", "prompt", prompt=[[]]),
        _completion("prompt one empty", "prompt", prompt=[[1], []]),
        _completion("prompt empty text", "prompt", prompt=""),
        _completion("prompt too long", "prompt", "maximum context length",
                    prompt=[1] * max_model_len, max_tokens=1),
        _completion("output too long", "max_tokens", "maximum context length",
                    max_tokens=max_model_len),
        _completion("output huge", "max_tokens", max_tokens=10**30),
        _completion("unknown model", "model", "The model `nope` does not exist.", 404,
                    model="nope"),
        _completion("model number", "model", model=3),
        _completion("max_tokens negative", "max_tokens", max_tokens=-1),
        _completion("max_tokens zero", "max_tokens", "echo", max_tokens=0),
        _completion("max_tokens text", "max_tokens", max_tokens="many"),
        _completion("max_tokens fraction", "max_tokens", max_tokens=1.5),
        _completion("max_tokens boolean", "max_tokens", max_tokens=True),
        _completion("min_tokens above max", "min_tokens", min_tokens=5),
        _completion("min_tokens negative", "min_tokens", min_tokens=-1),
        _completion("temperature negative", "temperature", temperature=-0.1),
        _completion("temperature text", "temperature", temperature="hot"),
        _completion("temperature huge", "temperature", temperature=1e9),
        _raw("temperature nan", b'{"prompt": "a", "temperature": NaN}'),
        _raw("temperature infinite", b'{"prompt": "a", "temperature": 1e999}'),
        _completion("top_p zero", "top_p", top_p=0),
        _completion("top_p above one", "top_p", top_p=1.1),
        _completion("top_k", "top_k", top_k=-2),
        _completion("top_k fraction", "top_k", top_k=1.5),
        _completion("min_p", "min_p", min_p=-0.1),
        _completion("frequency_penalty", "frequency_penalty", frequency_penalty=2.1),
        _completion("presence_penalty", "presence_penalty", presence_penalty=-2.1),
        _completion("repetition_penalty", "repetition_penalty", repetition_penalty=0),
        _completion("repetition overflow", "repetition_penalty", repetition_penalty=1e39),
        _completion("repetition huge", "repetition_penalty", repetition_penalty=1e300),
        _completion("repetition tiny", "repetition_penalty", repetition_penalty=1e-39),
        _completion("seed too large", "seed", seed=2**64),
        _completion("seed text", "seed", seed="x"),
        _completion("n zero", "n", n=0),
        _completion("n huge", "n", n=10**9),
        _completion("n greedy", "n", n=2, temperature=0),
        _completion("n above", "n", "--request-limits", n=257, temperature=1),
        _completion("many prompts", "n", "--request-limits", prompt=["a"] * 257),
        _completion("many stops", "stop", "--request-limits", stop=["a"] * 65),
        _completion("long stop", "stop", "stop_chars", stop="a" * 4097),
        _completion("many stop ids", "stop_token_ids", "1025", stop_token_ids=[1] * 1025),
        _completion("many bad words", "bad_words", "1025 words", bad_words=["a"] * 1025),
        _completion("long bad words", "bad_words", "bad_words_chars", bad_words=["a" * 500] * 40),
        _completion("many biases", "logit_bias", "1025",
                    logit_bias={str(i): 1 for i in range(1025)}),
        _completion("marks above", "cache_checkpoints", "65 offsets",
                    cache_checkpoints=list(range(1, 66))),
        _completion("mark huge", "cache_checkpoints", cache_checkpoints=[2**40]),
        _completion("long schema", "structured_outputs", "schema_chars",
                    structured_outputs={"choice": ["x" * 70_000]}),
        _completion("prompt of a book", "prompt", "chars_per_token", prompt="a " * 10**6),
        _completion("nothing allowed", "allowed_token_ids", "nothing could be generated",
                    allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1),
        _completion("n times prompts", "n", n=10_000, prompt=["a", "b"]),
        _completion("stop empty", "stop", stop=""),
        _completion("stop one empty", "stop", stop=["a", ""]),
        _completion("stop number", "stop", stop=3),
        _completion("stop_token_ids text", "stop_token_ids.0", stop_token_ids=["x"]),
        _completion("stop_token_ids negative", "stop_token_ids", stop_token_ids=[-1]),
        _completion("logprobs too many", "logprobs", logprobs=10**6),
        _completion("logprobs negative", "logprobs", logprobs=-2),
        _completion("prompt_logprobs too many", "prompt_logprobs", prompt_logprobs=10**6),
        _completion("prompt_logprobs stream", "prompt_logprobs", prompt_logprobs=1, stream=True),
        _completion("logit_bias list", "logit_bias", logit_bias=[1]),
        _completion("logit_bias key", "logit_bias", logit_bias={"x": 1}),
        _completion("logit_bias value", "logit_bias.5", logit_bias={"5": "much"}),
        _completion("logit_bias outside", "logit_bias", logit_bias={str(vocab_size): 1}),
        _completion("id outside", "prompt", prompt=[1, vocab_size]),
        _completion("id negative", "prompt", prompt=[-1]),
        _completion("id huge", "prompt", prompt=[2**70]),
        _completion("allowed outside", "allowed_token_ids", allowed_token_ids=[vocab_size]),
        _completion("allowed empty", "allowed_token_ids", allowed_token_ids=[]),
        _completion("bad_words empty", "bad_words", bad_words=[""]),
        _completion("truncate zero", "truncate_prompt_tokens", truncate_prompt_tokens=0),
        _completion("truncate too many", "truncate_prompt_tokens",
                    truncate_prompt_tokens=max_model_len + 1),
        _completion("suffix", "suffix", suffix="x"),
        _completion("beams in a stream", "stream", use_beam_search=True, stream=True),
        _completion("side", "truncation_side", truncation_side="top"),
        _completion("prompt_embeds", "prompt_embeds", prompt_embeds="AAAA"),
        _completion("format type", "response_format", response_format={"type": "yaml"}),
        _completion("format without type", "response_format", response_format={"schema": {}}),
        _completion("two structured", "structured_outputs", "exactly one",
                    structured_outputs={"regex": "a", "json": {}}),
        _completion("structured key", "structured_outputs.guide", "unknown key",
                    structured_outputs={"guide": "a"}),
        _completion("structured type", "structured_outputs", structured_outputs={"regex": 1}),
        _completion("structured twice", "response_format", response_format={"type": "json_object"},
                    structured_outputs={"regex": "a"}),
        _completion("regex", "structured_outputs", structured_outputs={"regex": "("}),
        _completion("choice", "structured_outputs", structured_outputs={"choice": []}),
        _completion("grammar", "structured_outputs", structured_outputs={"grammar": "a"}),
        _completion("endless grammar", "structured_outputs",
                    structured_outputs={"grammar": 'root ::= root "a"'}),
        _completion("structural tag", "response_format",
                    response_format={"type": "structural_tag", "format": {"type": "x"}}),
        _completion("stream_options alone", "stream_options",
                    stream_options={"include_usage": True}),
        _completion("stream text", "stream", stream="perhaps"),
        _completion("connector parameters", "kv_transfer_params", kv_transfer_params=[1]),
        _completion("connector number", "kv_transfer_params", kv_transfer_params={"a": 2**70}),
        _completion("no connector", "kv_transfer_params", "--kv-transfer-config",
                    kv_transfer_params={"a": 1}),
        _completion("cache_salt", "cache_salt", cache_salt=""),
        _completion("priority", "priority", priority=2**63),
        _chat("many messages", "messages", "4097 messages", messages=[{"role": "user"}] * 4097),
        _chat("many tools", "tools", "513 tools", tools=[
            {"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]),
        _chat("long schema in tools", "tools", "schema_chars", tool_choice="required", tools=[
            {"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "description": "x" * 70_000}}}]),
        _chat("conversation of a book", "messages", "chars_per_token",
              messages=[{"role": "user", "content": "a " * 10**6}]),
        BadRequest("tokenize a book", "/tokenize",
                   b'{"prompt": "' + b"a " * 10**6 + b'"}', "prompt", "chars_per_token"),
        *(_tokens("internal " + name, name, value) for name, value in (
            ("bad_words_token_ids", [[999999]]), ("bad_words_token_ids", [[]]),
            ("bad_words_token_ids", [[-5]]), ("eos_token_ids", [10**6]))),
        BadRequest("no messages", "/v1/chat/completions", b"{}", "messages"),
        _chat("messages text", "messages", messages="hi"),
        _chat("messages empty", "messages", messages=[]),
        _chat("message text", "messages.0", messages=["hi"]),
        _chat("no role", "messages.0.role", messages=[{"content": "hi"}]),
        _chat("role number", "messages.0.role", messages=[{"role": 1, "content": "hi"}]),
        _chat("no content", "messages.0.content", messages=[{"role": "user"}]),
        _chat("content number", "messages.0.content", messages=[{"role": "user", "content": 1}]),
        _chat("image", "messages.0.content.0", "only text",
              messages=[{"role": "user", "content": _IMAGE}]),
        _chat("part without text", "messages.0.content.0",
              messages=[{"role": "user", "content": [{"type": "text"}]}]),
        _chat("tool arguments", "messages.0.tool_calls.0.function.arguments", "JSON",
              messages=[{"role": "assistant", "tool_calls": [
                  {"type": "function", "function": {"name": "f", "arguments": "{"}}]}]),
        _chat("both prompts", "continue_final_message", add_generation_prompt=True,
              continue_final_message=True),
        _chat("chat too long", "max_tokens", "maximum context length", max_tokens=max_model_len),
        _chat("top_logprobs alone", "top_logprobs", top_logprobs=1),
        _chat("top_logprobs too many", "top_logprobs", "top_logprobs asks", logprobs=True,
              top_logprobs=10**6),
        _chat("top_logprobs negative", "top_logprobs", logprobs=True, top_logprobs=-2),
        _chat("max_completion_tokens zero", "max_completion_tokens", "max_completion_tokens must",
              max_completion_tokens=0),
        _chat("completion too long", "max_completion_tokens", "maximum context length",
              max_completion_tokens=max_model_len),
        _chat("logprobs number", "logprobs", logprobs=7),
        _chat("request template", "chat_template", chat_template="{{ 1 }}"),
        _chat("template kwargs", "chat_template_kwargs", chat_template_kwargs={"tokenize": True}),
        *(_chat(f"template kwarg {name}", "chat_template_kwargs", chat_template_kwargs={name: 1})
          for name in ("sanitize_control_tokens", "messages", "self", "conversation")),
        _chat("tools", "tools", tools=[_TOOL]),
        _chat("tool choice", "tool_choice", tool_choice="required"),
        _chat("tool choice number", "tool_choice", tool_choice=5),
        _completion("placement number", "placement", placement=5),
        _chat("no schema", "response_format",
              response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        _chat("schema", "response_format", "response_format: unknown type", response_format={
              "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "whole"}}}),
        _chat("impossible schema", "response_format", "minimum greater", response_format={
              "type": "json_schema", "json_schema": {
                  "name": "x", "schema": {"type": "integer", "minimum": 5, "maximum": 3}}}),
        _chat("inexact schema", "response_format", "uniqueItems", response_format={
              "type": "json_schema", "json_schema": {
                  "name": "x", "schema": {"type": "array", "uniqueItems": True}}}),
        _chat("long schema in a format", "response_format", "schema_chars", response_format={
              "type": "json_schema", "json_schema": {
                  "name": "x", "schema": {"const": "x" * 70_000}}}),
        _chat("schema of a forced tool", "tools", "tools: unknown type", tool_choice="required",
              tools=[{"type": "function", "function": {"name": "f", "parameters": _BAD_OBJECT}}]),
        _chat("chat unknown model", "model", status=404, model="nope"),
        BadRequest("tokenize nothing", "/tokenize", b"{}", "prompt"),
        BadRequest("detokenize text", "/detokenize", b'{"tokens": ["a"]}', "tokens.0"),
        BadRequest("detokenize outside", "/detokenize",
                   b'{"tokens": [%d]}' % vocab_size, "tokens"),
        BadRequest("detokenize negative", "/detokenize", b'{"tokens": [-1]}', "tokens"),
        BadRequest("generate nothing", "/inference/v1/generate", b"{}", "token_ids"),
        BadRequest("other API", "/v1/embeddings", b"{}", None, "/v1/chat/completions", 501),
        BadRequest("responses nothing", "/v1/responses", b"{}", "input"),
        _response("output tokens zero", "max_output_tokens", max_output_tokens=0),
        _response("logprobs of a response", "top_logprobs", "top_logprobs asks",
                  top_logprobs=10**6),
        _response("format of a response", "text.format", "text.format: unknown type",
                  text={"format": {"type": "json_schema", "name": "x", "schema": _BAD_OBJECT}}),
        BadRequest("responses stored", "/v1/responses",
                   b'{"input": "hi", "previous_response_id": "x"}', "previous_response_id"),
        BadRequest("no route", "/v1/nothing", b"{}", status=404),
    ]  # fmt: skip


#: checks that need the engine's own validation, which the fake engine does not have
ENGINE_CHECKS = frozenset(
    {
        "no connector",
        "logprobs too many",
        "prompt_logprobs too many",
        "top_logprobs too many",
        "logit_bias outside",
        "id outside",
        "mark huge",
        "nothing allowed",
        "id negative",
        "id huge",
        "allowed outside",
        "regex",
        "choice",
        "grammar",
        "endless grammar",
        "structural tag",
        "schema",
        "impossible schema",
        "inexact schema",
        "schema of a forced tool",
        "logprobs of a response",
        "format of a response",
    }
)
