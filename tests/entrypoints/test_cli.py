# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command: dispatch, flags of `serve`, and the two small clients."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli import openai_client
from vllm.entrypoints.cli.collect_env import CollectEnvCommand, describe_environment
from vllm.entrypoints.cli.main import SUBCOMMANDS, load_command, main
from vllm.entrypoints.cli.serve import choose_model
from vllm.entrypoints.openai.cli_args import DEFAULT_MODEL, FrontEndArgs, make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.start_method import start_method
from vllm.version import __version__


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in SUBCOMMANDS)


@pytest.mark.parametrize("argv", [[], ["nonsense"]])
def test_unknown_command_shows_help_and_fails(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) != 0
    assert "usage: vllm" in capsys.readouterr().err


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import sys; from vllm.entrypoints.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'fastapi', 'pydantic', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=240)


@pytest.mark.parametrize("name", list(SUBCOMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([*name.split(), "--help"])
    assert done.value.code == 0 and name in capsys.readouterr().out


@pytest.mark.usefixtures("forking")
def test_commands_spawn_processes_unless_they_are_told_to_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def note(self: CollectEnvCommand, args: argparse.Namespace) -> int:
        found.append(start_method())
        return 0

    monkeypatch.setattr(CollectEnvCommand, "run", note)
    main(["collect-env"])
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    main(["collect-env"])
    assert found == ["fork", "spawn"]
    assert start_method() == "fork", "which ends with the command"


def parse(*flags: str) -> tuple[FrontEndArgs, AsyncEngineArgs]:
    parser = FlexibleArgumentParser()
    load_command("serve").add_arguments(parser)
    namespace = parser.parse_args(list(flags))
    namespace.model = choose_model(namespace.model_tag, namespace.model)
    return FrontEndArgs.from_cli_args(namespace), AsyncEngineArgs.from_cli_args(namespace)


def test_the_flags_that_speculators_passes() -> None:
    front, engine = parse(
        *["m", "--port", "8001", "--host", "127.0.0.1", "--max-model-len", "129"],
        *["--gpu-memory-utilization", "0.8", "--disable-uvicorn-access-log", "--enforce-eager"],
        *["--data-parallel-size", "1", "-tp", "1", "--trust-remote-code", "--api-key", ""],
        *["--reasoning-parser", "", "--no-enable-chunked-prefill"],
        *["--api-server-count", "4", "--renderer-num-workers", "2"],
        *["--speculative_config", '{"method": "extract_hidden_states"}'],
        *["--kv_transfer_config", '{"kv_connector": "C", "kv_role": "kv_producer"}'],
    )
    assert (front.host, front.port) == ("127.0.0.1", 8001)
    assert front.disable_uvicorn_access_log and front.api_keys() == []
    assert front.api_server_count == 4 and front.renderer_num_workers == 2
    assert engine.model == "m" and engine.max_model_len == 129 and engine.enforce_eager
    assert engine.enable_chunked_prefill is False
    assert engine.speculative_config == {"method": "extract_hidden_states"}
    assert engine.kv_transfer_config["kv_role"] == "kv_producer"


def test_defaults_and_lists() -> None:
    front, engine = parse()
    assert front.port == 8000 and front.host is None and front.allowed_origins == ["*"]
    assert engine.model == DEFAULT_MODEL
    front, engine = parse(
        *["m", "--served-model-name", "a", "b", "--api-key", "k1", "k2"],
        *["--allowed-origins", '["http://a"]', "--max-request-body-size", "1K"],
    )
    assert engine.served_model_name == ["a", "b"] and front.api_keys() == ["k1", "k2"]
    assert front.allowed_origins == ["http://a"] and front.max_request_body_size == 1024


def test_choice_of_model(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_model(None, None) == DEFAULT_MODEL
    assert choose_model(None, "flag") == "flag"
    assert choose_model("positional", "flag") == "positional"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": 70000}, "--port"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"ssl_ciphers": "x"}, "--ssl-ciphers needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-certfile"),
        ({"enable_ssl_refresh": True}, "--enable-ssl-refresh needs --ssl-certfile"),
        (
            {"log_config_file": "f", "disable_access_log_for_endpoints": "/health"},
            "no effect with --log-config-file",
        ),
        (
            {"disable_access_log_for_endpoints": "/ping, health"},
            "--disable-access-log-for-endpoints: 'health' is no path.*as in /health",
        ),
        ({"max_log_len": -5}, "--max-log-len"),
        ({"reasoning_parser": "x"}, "reasoning parser 'x'; available: deepseek_r1"),
        ({"tool_call_parser": "x"}, "tool call parser 'x'; available: "),
        ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice needs --tool-call-parser"),
        ({"tool_parser_plugin": "nowhere.py"}, "--tool-parser-plugin: 'nowhere.py'"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout"),
        ({"headless": True, "api_server_count": 2}, "--headless with --api-server-count 2"),
        ({"api_server_count": 0}, "--api-server-count"),
        ({"api_server_count": -2}, "--api-server-count"),
        ({"api_server_death": "ignore"}, "--api-server-death"),
        ({"renderer_num_workers": 0}, "--renderer-num-workers"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_bad_arguments_are_named(fields: dict, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        FrontEndArgs(**fields)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grpc"], "--grpc True: not supported yet: gRPC; instead, use HTTP"),
        (["--lora-modules", "a=b", "c=d"], "--lora-modules .*LoRA adapters"),
        (["--h11-max-incomplete-event-size", "10"], "--max-request-body-size"),
        (["--tokens-only"], "--skip-tokenizer-init"),
        (["--mm-encoder-tp-mode", "data"], "image, audio and video"),
    ],
)
def test_flags_of_other_releases_are_answered(flags: list[str], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        parse("m", *flags)


def test_flags_of_other_releases_pass_at_their_default() -> None:
    parse("m", "--no-grpc", "--h11-max-header-count", "256", "--mm-encoder-tp-mode", "weights")


def test_errors_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--enable-auto-tool-choice"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("vllm serve: error: --enable-auto-tool-choice")


def test_a_reader_that_leaves_is_no_failure() -> None:
    """As in `vllm serve --help=all | head -1`."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_usage_says_which_words_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain"])
    assert "usage: vllm explain MODEL [flags]" in capsys.readouterr().err


def test_an_unknown_connector_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    connector = '{"kv_connector": "Nope", "kv_role": "kv_both"}'
    model = "examples/models/tiny-qwen3_5-code"
    assert main(["explain", model, "--kv-transfer-config", connector]) == 1
    error = capsys.readouterr().err
    assert "vllm explain: error: unknown KV connector 'Nope'" in error
    assert "Traceback" not in error


def test_make_arg_parser_is_public() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["--model", "m"]).model == "m"


def test_reports_hide_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    shown = dict(describe_environment())
    assert shown["VLLM_API_KEY"] == "***" and shown["VLLM_LOGGING_LEVEL"] == "INFO"


class FakeAPI:
    """Answers like a server and keeps the requests."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.keys: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["authorization"])
        if not request.url.path.startswith("/v1/"):
            return httpx.Response(404, json={"detail": "Not Found"})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        self.bodies.append(json.loads(request.content))
        if self.bodies[-1].get("prompt") == "fail":
            return httpx.Response(400, json={"error": {"message": "no such thing"}})
        chat = request.url.path.endswith("chat/completions")
        pieces = [{"delta": {"role": "assistant", "content": ""}}] if chat else []
        pieces += [{"delta": {"content": t}} if chat else {"text": t} for t in ("Hel", "lo")]
        lines = [json.dumps({"choices": [piece]}) for piece in pieces]
        lines += [json.dumps({"choices": [], "usage": {}}), "[DONE]"]
        return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeAPI:
    fake = FakeAPI()
    real = openai_client.APIClient
    monkeypatch.setattr(
        openai_client, "APIClient", lambda url, key: real(url, key, httpx.MockTransport(fake))
    )
    return fake


def test_quick_completion(api: FakeAPI, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-q", "hi", "--max-tokens", "3", "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "Using model: served\nHello\n"
    assert api.bodies == [{"model": "served", "prompt": "hi", "max_tokens": 3, "stream": True}]
    assert set(api.keys) == {"Bearer k"}


def test_quick_chat(
    api: FakeAPI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    assert main(["chat", "--quick", "hi", "--system-prompt", "be", "--model-name", "m"]) == 0
    assert capsys.readouterr().out == "Using model: m\nHello\n"
    assert [m["role"] for m in api.bodies[0]["messages"]] == ["system", "user"]
    assert set(api.keys) == {"Bearer from-env"}


def test_interactive_chat_remembers(api: FakeAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "", "two"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat"]) == 0
    assert [m["content"] for m in api.bodies[1]["messages"]] == ["one", "Hello", "two"]
    assert set(api.keys) == {"Bearer EMPTY"} or "OPENAI_API_KEY" in os.environ


def test_server_errors_reach_the_user(api: FakeAPI, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-q", "fail"]) == 1
    assert "no such thing" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_failed_turn_does_not_end_the_session(
    api: FakeAPI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["fail", "hi"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["complete"]) == 0
    shown = capsys.readouterr()
    assert "error: the server answered 400: no such thing" in shown.err and "Hello" in shown.out


def test_groups_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "bench serve" in shown and "collect-env" not in shown
    assert main(["bench"]) == 2 and main(["bench", "sweep"]) == 2
    shown = capsys.readouterr().err
    assert "vllm bench: error: no command given" in shown and "unknown command 'sweep'" in shown


def test_a_url_without_v1(api: FakeAPI, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-q", "hi", "--url", "http://localhost:8000"]) == 1
    said = capsys.readouterr().err
    assert "the server answered 404" in said and "(/models was asked for: --url ends with" in said


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-q", "hi", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "cannot reach http://127.0.0.1:9/v1" in capsys.readouterr().err
