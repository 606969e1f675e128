# SPDX-License-Identifier: Apache-2.0
"""Environment variables: lazy, typed, tolerant of unknown names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vllm import envs
from vllm.envs_table import TABLE


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
    ],
)
def test_bad_values_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'"):
        getattr(envs, name)


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
