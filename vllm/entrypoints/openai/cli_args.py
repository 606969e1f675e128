# SPDX-License-Identifier: Apache-2.0
"""Flags of the HTTP server itself; the engine's come from `AsyncEngineArgs`."""

from __future__ import annotations

import argparse
import ssl
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vllm import envs
from vllm.engine.unsupported_flags import (
    UNSUPPORTED_SERVER_FLAGS,
    add_unsupported,
    check_unsupported,
)
from vllm.entrypoints.openai.request_limits import RequestLimits
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.plugins.parser_file import import_parser_file
from vllm.reasoning import reasoning_parsers
from vllm.tool_parsers import tool_parsers
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.class_registry import resolve_class
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace
from vllm.utils.options import FlagKind, config, flag_name, option

#: `api_server_count`: as many as are of use
AUTO = -1
#: served when no model is named
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


@config
class FrontEndArgs:
    """Network, security, logging and reply options of the server."""

    host: str | None = option(default=None, help="Address to listen on; all interfaces if unset.")
    port: Annotated[int, Field(ge=0, le=65535)] = option(
        default=8000, help="TCP port; 0 takes a free one."
    )
    uds: str | None = option(default=None, help="Unix socket to listen on instead of host, port.")
    api_key: list[str] | None = option(
        default=None,
        help="Keys of which requests must present one as bearer token; also VLLM_API_KEY. An empty "
        "string means no authentication.",
    )
    root_path: str | None = option(default=None, help="Path prefix that a proxy strips.")
    allowed_origins: list[str] = option(
        default_factory=lambda: ["*"], kind=FlagKind.JSON, help="CORS origins, a JSON list."
    )
    allowed_methods: list[str] = option(
        default_factory=lambda: ["*"], kind=FlagKind.JSON, help="CORS methods, a JSON list."
    )
    allowed_headers: list[str] = option(
        default_factory=lambda: ["*"], kind=FlagKind.JSON, help="CORS headers, a JSON list."
    )
    allow_credentials: bool = option(default=False, help="CORS: allow credentials.")
    ssl_keyfile: str | None = option(default=None, help="Private key for HTTPS.")
    ssl_certfile: str | None = option(default=None, help="Certificate for HTTPS.")
    ssl_ca_certs: str | None = option(default=None, help="Certificates that sign clients' ones.")
    ssl_cert_reqs: int = option(
        default=int(ssl.CERT_NONE), help="Client certificates: 0 none, 1 optional, 2 required."
    )
    ssl_ciphers: str | None = option(default=None, help="OpenSSL cipher list.")
    enable_ssl_refresh: bool = option(
        default=False, help="Load certificate and key again when their files change."
    )
    middleware: list[str] = option(
        default_factory=list,
        help="Dotted paths of extra ASGI middleware classes, the first one outermost.",
    )
    max_request_body_size: PositiveInt = option(
        default=64 * 2**20,
        kind=FlagKind.HUMAN_INT,
        help="Largest request body in bytes; larger ones get status 413.",
    )
    request_limits: dict[str, int] = option(
        default_factory=dict,
        help="How much one request may ask for, a JSON object, as in "
        '{"sequences": 512, "bad_words": 2000}; names and defaults are in docs/server.md.',
    )
    max_connections: PositiveInt | None = option(
        default=None, help="Open connections; further ones get status 503. No limit if unset."
    )
    max_queued_requests: NonNegativeInt | None = option(
        default=None,
        help="Generation requests accepted beyond --max-num-seqs of all replicas; further ones get "
        "status 503 with Retry-After. No limit if unset.",
    )
    request_timeout: PositiveFloat | None = option(
        default=None,
        help="Seconds a request may take from its arrival to the end of its reply, then it is "
        "aborted: status 504, or an error event in a stream. No limit if unset.",
    )
    enable_request_id_headers: bool = option(
        default=False, help="Send X-Request-Id with every reply."
    )
    disable_fastapi_docs: bool = option(default=False, help="No /docs and /openapi.json.")
    api_server_count: int = option(
        default=1,
        aliases=("-asc",),
        kind=FlagKind.LENGTH,
        help="API processes that share the port, in front of one engine; auto (-1): one per 256 of "
        "--max-num-seqs of all replicas, as far as there are cores.",
    )
    api_server_death: Literal["replace", "stop"] = option(
        default="replace",
        help="What follows when one of several API processes dies: another one takes its place, or "
        "the server stops.",
    )
    on_failure: Literal["stop", "restart"] = option(
        default="stop",
        help="What follows when the engine dies, one of its workers, hosts or Ray actors included: "
        "the server stops with status 1, or starts anew, at most three times within an hour.",
    )
    renderer_num_workers: PositiveInt | None = option(
        default=None,
        help="Threads that apply chat templates and tokenise; one per CPU, at most 8, if unset.",
    )
    headless: bool = option(
        default=False,
        help="No API and no engine: workers for node 0, on a host with --node-rank 1 or more.",
    )
    enable_tokenizer_info_endpoint: bool = option(default=False, help="Mount GET /tokenizer_info.")

    chat_template: str | None = option(
        default=None, help="Chat template, a file or inline Jinja; default: the tokenizer's."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        default="auto",
        help="How templates see message contents: one string, or OpenAI parts; auto looks.",
    )
    trust_request_chat_template: bool = option(
        default=False, help="Allow requests to bring their own chat template."
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        default=None, help="Template variables that requests may override, a JSON object."
    )
    response_role: str = option(default="assistant", help="Role of generated chat messages.")
    exclude_tools_when_tool_choice_none: bool = option(
        default=False, help='Do not show tools to the model when tool_choice is "none".'
    )
    return_tokens_as_token_ids: bool = option(
        default=False, help="Show tokens of logprobs as token_id:N."
    )
    enable_prompt_tokens_details: bool = option(
        default=True, help="Report cached prompt tokens in usage."
    )
    enable_force_include_usage: bool = option(
        default=False, help="Report usage in every chunk of a stream and at its end."
    )
    enable_server_load_tracking: bool = option(
        default=True, help="Count the requests in progress for GET /load."
    )
    enable_auto_tool_choice: bool = option(
        default=False,
        help="Let the model decide about tool calls; needs --tool-call-parser.",
    )
    tool_call_parser: str | None = option(
        default=None,
        help="Format of the model's tool calls: harmony, hermes, kimi_k2, llama3_json, mistral, "
        "nemotron_json, olmo3, pythonic, qwen3_coder or a plug-in's.",
    )
    tool_parser_plugin: str | None = option(
        default=None, help="Python file that registers tool call parsers."
    )
    reasoning_parser: str = option(
        default="",
        help="Format of the model's reasoning, sent as `reasoning` instead of `content`: "
        "deepseek_r1, harmony, nemotron_v3, qwen3 or a plug-in's.",
    )
    reasoning_parser_plugin: str | None = option(
        default=None, help="Python file that registers reasoning parsers."
    )

    enable_log_requests: bool = option(default=False, help="Log every request.")
    enable_log_outputs: bool = option(default=False, help="Log everything generated.")
    max_log_len: NonNegativeInt | None = option(
        default=None, help="Characters or token ids shown per logged prompt or output."
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        default="info", help="Log level of the HTTP server."
    )
    disable_uvicorn_access_log: bool = option(default=False, help="No line per HTTP request.")
    disable_access_log_for_endpoints: str | None = option(
        default=None, help="Comma list of paths without an access log line."
    )
    log_config_file: str | None = option(
        default=None, help="JSON file for logging.dictConfig, for the HTTP server's loggers."
    )
    log_error_stack: bool = option(default=False, help="Log the trace of every error reply.")
    shutdown_timeout: NonNegativeFloat = option(
        default=20.0, help="Seconds that running requests get to finish after SIGTERM or SIGINT."
    )

    def __post_init__(self) -> None:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise VLLMValidationError(
                "--ssl-keyfile and --ssl-certfile only work together", "ssl_certfile"
            )
        self._check_dependent()
        self._check_parsers()
        self._check_processes()
        RequestLimits.from_flag(self.request_limits)

    def _check_dependent(self) -> None:
        """Flags that would have no effect."""
        for name in ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"):
            if getattr(self, name) and not self.ssl_certfile:
                raise VLLMValidationError(
                    f"{flag_name(name)} needs --ssl-certfile and --ssl-keyfile", name
                )
        paths = (self.disable_access_log_for_endpoints or "/").split(",")
        if wrong := [path for path in map(str.strip, paths) if path[:1] not in ("", "/")]:
            raise VLLMValidationError(
                f"--disable-access-log-for-endpoints: {wrong[0]!r} is no path, which begins with a "
                "slash, as in /health,/metrics",
                "disable_access_log_for_endpoints",
                wrong[0],
            )
        if self.log_config_file and self.disable_access_log_for_endpoints:
            raise VLLMValidationError(
                "--disable-access-log-for-endpoints has no effect with --log-config-file; name "
                "vllm.entrypoints.access_log.WithoutPaths as a filter in the file",
                "disable_access_log_for_endpoints",
            )

    def _check_parsers(self) -> None:
        """Known parsers only; a plug-in may bring them."""
        for flag in ("tool_parser_plugin", "reasoning_parser_plugin"):
            if path := getattr(self, flag):
                import_parser_file(path, flag_name(flag))
        if self.tool_call_parser or self.reasoning_parser:
            load_general_plugins()
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise VLLMValidationError(
                "--enable-auto-tool-choice needs --tool-call-parser "
                f"({', '.join(tool_parsers.names())})",
                "enable_auto_tool_choice",
            )
        if self.tool_call_parser:
            tool_parsers.get(self.tool_call_parser)
        if self.reasoning_parser:
            reasoning_parsers.get(self.reasoning_parser)

    def _check_processes(self) -> None:
        if self.headless and self.api_server_count > 1:
            raise VLLMValidationError(
                f"--headless with --api-server-count {self.api_server_count}: a host without API "
                "has no API processes; leave one of them out",
                "headless",
            )
        if self.api_server_count != AUTO and self.api_server_count < 1:
            raise VLLMValidationError(
                f"--api-server-count must be positive or auto, got {self.api_server_count}",
                "api_server_count",
                self.api_server_count,
            )

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> FrontEndArgs:
        """The server's part of a parsed command line."""
        check_unsupported(vars(namespace), UNSUPPORTED_SERVER_FLAGS)
        return from_namespace(cls, namespace)

    def api_keys(self) -> list[str]:
        """The keys in force; empty strings do not count."""
        keys = self.api_key if self.api_key is not None else [envs.VLLM_API_KEY or ""]
        return [key for key in keys if key]


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add the server's and the engine's flags to `parser`."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    add_dataclass_flags(parser, FrontEndArgs, "Frontend")
    add_unsupported(parser, "Unsupported frontend", UNSUPPORTED_SERVER_FLAGS)
    return AsyncEngineArgs.add_cli_args(parser)


def import_middleware(path: str) -> Any:
    """What `--middleware` names by its dotted path; `VLLMValidationError` when there is none."""
    try:
        return resolve_class(path)
    except ValueError as error:
        raise VLLMValidationError(f"--middleware: {error}", "middleware", path) from None
