# SPDX-License-Identifier: Apache-2.0
"""`vllm chat` and `vllm complete`: small clients for a running server."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from vllm.entrypoints.cli.types import CLISubcommand, CommandError
from vllm.utils.argparse_utils import FlexibleArgumentParser

#: connecting and sending are quick; a token may take long
_TIMEOUT = httpx.Timeout(10.0, read=None)


class APIClient:
    """The three calls that the commands need."""

    def __init__(
        self, url: str, api_key: str, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(
            base_url=url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=_TIMEOUT,
            transport=transport,
        )

    def first_model(self) -> str:
        """The first name that the server lists."""
        reply = self._http.get("models")
        _raise_for_error(reply)
        return str(reply.json()["data"][0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The first choice of every chunk; raises `CommandError` with the server's message."""
        with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
            if reply.is_error:
                reply.read()
            _raise_for_error(reply)
            for line in reply.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise CommandError(chunk["error"]["message"])
                if chunk["choices"]:
                    yield chunk["choices"][0]


def _raise_for_error(reply: httpx.Response) -> None:
    if reply.is_error:
        try:
            error = reply.json()["error"]
            message = error if isinstance(error, str) else error["message"]
        except (ValueError, KeyError, TypeError):
            message = reply.text
        path = reply.request.url.path
        if reply.status_code == httpx.codes.NOT_FOUND and not path.startswith("/v1/"):
            message += f" ({path} was asked for: --url ends with /v1)"
        raise CommandError(f"the server answered {reply.status_code}: {message}")


def _show(texts: Iterator[str]) -> str:
    """Print pieces as they come; returns the whole."""
    pieces = []
    for text in texts:
        print(text, end="", flush=True)
        pieces.append(text)
    print()
    return "".join(pieces)


def _interact(turn: Callable[[str], None]) -> None:
    """Read lines until end of file or an interrupt; a turn that fails does not end it."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        try:
            turn(line)
        except (CommandError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)


class _ClientCommand(CLISubcommand):
    """Flags and connection shared by the two commands."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        parser.add_argument(
            "--url", default="http://localhost:8000/v1", help="Server, with /v1 (%(default)s)."
        )
        parser.add_argument("--model-name", help="Model; default: the first that is served.")
        parser.add_argument("--api-key", help="Key; default: OPENAI_API_KEY, else EMPTY.")
        parser.add_argument("-q", "--quick", metavar="TEXT", help="One turn, then exit.")

    def connect(self, args: argparse.Namespace) -> tuple[APIClient, str]:
        """The client and the model's name, which becomes the first line of output."""
        key = args.api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
        client = APIClient(args.url, key)
        try:
            model = args.model_name or client.first_model()
        except httpx.HTTPError as error:
            raise CommandError(f"cannot reach {args.url}: {error}") from error
        print(f"Using model: {model}", flush=True)
        return client, model


class ChatCommand(_ClientCommand):
    """Keeps the conversation and streams each reply."""

    description = "Chat with a running server."

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--system-prompt", help="System message before the conversation.")

    def run(self, args: argparse.Namespace) -> int:
        client, model = self.connect(args)
        messages: list[dict[str, str]] = []
        if args.system_prompt:
            messages.append({"role": "system", "content": args.system_prompt})

        def turn(text: str) -> None:
            turns = [*messages, {"role": "user", "content": text}]
            choices = client.stream("chat/completions", {"model": model, "messages": turns})
            reply = _show(choice["delta"].get("content") or "" for choice in choices)
            messages[:] = [*turns, {"role": "assistant", "content": reply}]

        if args.quick is not None:
            turn(args.quick)
        else:
            _interact(turn)
        return 0


class CompleteCommand(_ClientCommand):
    """Continues each text by itself."""

    description = "Complete text with a running server."

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--max-tokens", type=int, help="Tokens to generate.")

    def run(self, args: argparse.Namespace) -> int:
        client, model = self.connect(args)

        def turn(text: str) -> None:
            body: dict[str, Any] = {"model": model, "prompt": text}
            if args.max_tokens is not None:
                body["max_tokens"] = args.max_tokens
            _show(choice["text"] for choice in client.stream("completions", body))

        if args.quick is not None:
            turn(args.quick)
        else:
            _interact(turn)
        return 0
