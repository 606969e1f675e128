# SPDX-License-Identifier: Apache-2.0
"""Environment variables: lazy, typed, tolerant of unknown names."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm import envs
from vllm.envs_table import TABLE

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_variable_has_a_default_and_a_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    getattr(envs, name)
    assert TABLE[name].help and name in dir(envs)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VLLM_SERVER_DEV_MODE", "1", True),
        ("VLLM_SERVER_DEV_MODE", "true", True),
        ("VLLM_SERVER_DEV_MODE", "0", False),
        ("VLLM_SERVER_DEV_MODE", "", False),
        ("VLLM_CPU_KVCACHE_SPACE", "0.5", 0.5),
        ("VLLM_PLUGINS", "a, b", ["a", "b"]),
        ("VLLM_PLUGINS", "", []),
        ("VLLM_PP_LAYER_PARTITION", "3, 1", [3, 1]),
        ("VLLM_API_KEY", "", None),
        ("VLLM_KV_CACHE_LAYOUT", "hnd", "HND"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "spawn"),
        ("VLLM_LOGGING_LEVEL", "debug", "DEBUG"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "9", 9),
    ],
)
def test_values_are_read_at_look_up(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(envs, name) == value
    monkeypatch.delenv(name)
    assert getattr(envs, name) != value or value in (False, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_SERVER_DEV_MODE", "maybe"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "soon"),
        ("VLLM_KV_CACHE_LAYOUT", "HWC"),
        ("VLLM_TARGET_DEVICE", "tpu"),
        ("VLLM_PP_LAYER_PARTITION", "half"),
        ("VLLM_LOGGING_LEVEL", "loud"),
        ("VLLM_LOG_STATS_INTERVAL", "often"),
        ("VLLM_LOG_STATS_INTERVAL", "0"),
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "-1"),
    ],
)
def test_bad_values_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'"):
        getattr(envs, name)
    with pytest.raises(ValueError, match=f"{name}='{text}'"):
        envs.check_variables()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("[]", "."),
        ('{"version": 1, "handlers": {"x": {"class": "no.Such"}}}', "handler 'x'.*No module"),
    ],
)
def test_a_bad_logging_file_is_named(content: str | None, reason: str, tmp_path: Path) -> None:
    """It is read with the first import, when nothing could say what the matter is."""
    path = tmp_path / "logging.json"
    if content is not None:
        path.write_text(content)
    code = "from vllm import envs; envs.check_variables()"
    env = {**os.environ, "VLLM_LOGGING_CONFIG_PATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"VLLM_LOGGING_CONFIG_PATH='.*logging.json': .*{reason}", last), done.stderr


def test_variables_without_effect_may_have_any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes says so of a service that is called vllm."""
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    envs.check_variables()


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_SUCH_THING", "1")
    assert "VLLM_NO_SUCH_THING" in envs.unknown_variables()
    with pytest.raises(AttributeError):
        envs.VLLM_NO_SUCH_THING  # noqa: B018
    seen: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.envs"), "warning", lambda text, *args: seen.append(text % args)
    )
    envs.warn_unknown_variables()
    assert len(seen) == 1 and "VLLM_NO_SUCH_THING" in seen[0]


def test_what_has_no_effect_says_what_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of other releases start replicas with these; one that does nothing is no trouble.
    Kubernetes tells of a service in a variable that looks like one of ours."""
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    monkeypatch.setenv("VLLM_DP_RANK", "0")
    seen: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.envs"), "warning", lambda text, *args: seen.append(text % args)
    )
    envs.warn_unknown_variables()
    (said,) = [line for line in seen if "_DP_" in line]
    assert said.startswith("VLLM_DP_SIZE=2 has no effect") and "--data-parallel-rank" in said
    assert any(line.startswith("VLLM_PORT=tcp://10.0.0.1:8000 has no effect") for line in seen)


def test_cache_root_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert envs.VLLM_CACHE_ROOT == "/c/vllm"
