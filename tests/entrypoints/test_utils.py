# SPDX-License-Identifier: Apache-2.0
"""Ids and merged streams, token limits, certificate refresh."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from vllm.entrypoints.access_log import WithoutPaths, log_config, set_up_logging
from vllm.entrypoints.launcher import _uvicorn_config, refresh_certificates
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.sampling import resolve_max_tokens
from vllm.entrypoints.tally import Tallies
from vllm.entrypoints.utils import merge, safe_id
from vllm.exceptions import VLLMValidationError


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a.b-c_1", "a.b-c_1"), ("../../etc", "_.._etc"), ("a/b\n", "a_b_"), ("x" * 300, "x" * 100)],
)
def test_safe_ids(given: str, expected: str) -> None:
    assert safe_id(given) == expected


@pytest.mark.parametrize("nothing", [None, "", "..."])
def test_missing_ids_are_random(nothing: str | None) -> None:
    assert len(safe_id(nothing)) == 32 and safe_id(nothing) != safe_id(nothing)


class Source:
    """Counts up; remembers how it ended."""

    def __init__(self, length: int, fail: bool = False) -> None:
        self.length = length
        self.fail = fail
        self.closed = False

    async def run(self, index: int = 0) -> AsyncGenerator[tuple[int, int], None]:
        try:
            for i in range(self.length):
                await asyncio.sleep(0)
                yield index, i
            if self.fail:
                raise RuntimeError("broken")
        finally:
            self.closed = True


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [1, 3])
async def test_merge_yields_everything_in_order(count: int) -> None:
    sources = [Source(4) for _ in range(count)]
    seen: dict[int, list[int]] = {i: [] for i in range(count)}
    async for index, item in merge([source.run(i) for i, source in enumerate(sources)]):
        seen[index].append(item)
    assert all(items == [0, 1, 2, 3] for items in seen.values())
    assert all(source.closed for source in sources)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [1, 3])
async def test_closing_a_merge_closes_its_sources(count: int) -> None:
    sources = [Source(10**6) for _ in range(count)]
    merged = merge([source.run() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


@pytest.mark.asyncio
async def test_a_failing_source_ends_the_merge() -> None:
    sources = [Source(10**6), Source(2, fail=True)]
    with pytest.raises(RuntimeError, match="broken"):
        async for _ in merge([source.run() for source in sources]):
            pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize(
    ("requested", "default", "prompt", "cap", "expected"),
    [
        (5, 16, 10, None, 5),
        (90, 16, 10, None, 90),
        (None, 16, 10, None, 16),
        (None, 16, 95, None, 5),
        (None, None, 10, None, 90),
        (None, None, 10, 7, 7),
        (50, None, 10, 7, 7),
        (0, 16, 10, None, 0),
    ],
)
def test_output_limits(
    requested: int | None, default: int | None, prompt: int, cap: int | None, expected: int
) -> None:
    assert resolve_max_tokens(requested, default, prompt, 100, cap) == expected


@pytest.mark.parametrize(("requested", "prompt"), [(91, 10), (1, 100), (None, 100), (0, 101)])
def test_output_limits_exceeded(requested: int | None, prompt: int) -> None:
    with pytest.raises(VLLMValidationError, match="^This model's maximum context length is 100"):
        resolve_max_tokens(requested, 16, prompt, 100, None)


@pytest.mark.asyncio
async def test_changed_certificates_are_loaded(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c", tmp_path / "k"
    for file in (certificate, key):
        file.write_text("1")
    loads: list[tuple[str, str]] = []

    class Context:
        def load_cert_chain(self, chain: str, key: str, password: str | None) -> None:
            loads.append((chain, key))
            if len(loads) == 1:
                raise OSError("half written")

    config = SimpleNamespace(
        ssl_certfile=certificate, ssl_keyfile=key, ssl=Context(), ssl_keyfile_password=None
    )
    task = asyncio.create_task(refresh_certificates(config, interval_s=0.01))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert not loads
    os.utime(certificate, (1, 1))
    deadline = time.monotonic() + 60
    while len(loads) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    assert loads == [(str(certificate), str(key))] * 2


def access(path: str) -> logging.LogRecord:
    arguments = ("127.0.0.1:1", "GET", path, "1.1", 200)
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "%s %s", arguments, None)


def test_access_log_filter() -> None:
    hide = WithoutPaths(["/health"])
    assert not hide.filter(access("/health")) and not hide.filter(access("/health?x=1"))
    assert hide.filter(access("/healthy")) and hide.filter(access("/v1/models"))


def test_log_config_file(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps({"version": 1}))
    assert log_config(FrontEndArgs(log_config_file=str(file))) == {"version": 1}
    file.write_text("{")
    with pytest.raises(VLLMValidationError, match="--log-config-file"):
        log_config(FrontEndArgs(log_config_file=str(file)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "expected a JSON object"),
        ('{"version": 1, "handlers": {"x": {"class": "no.Such"}}}', "'x'.*No module named 'no'"),
        ('{"version": 2}', "Unsupported version"),
    ],
)
def test_what_logging_cannot_do_is_found_before_the_model_is_loaded(
    content: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "log.json"
    file.write_text(content)
    with pytest.raises(VLLMValidationError, match=f"--log-config-file .*log.json: .*{reason}"):
        set_up_logging(FrontEndArgs(log_config_file=str(file)))


def test_a_server_does_not_set_logging_up_again() -> None:
    """The file is read once, so what a start has checked is what holds."""
    args = FrontEndArgs(log_config_file="/not/there.json")
    assert _uvicorn_config(FastAPI(), args, Tallies()).log_config is None
