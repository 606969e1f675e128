# SPDX-License-Identifier: Apache-2.0
"""Entry-point plugins."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm import plugins

GROUP = plugins.DEFAULT_PLUGINS_GROUP
MODULE = """
calls = []

def first():
    calls.append("first")

def second():
    calls.append("second")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three plugins, the last of which cannot be imported; the calls made so far."""
    (tmp_path / "demo_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "demo_plugin", raising=False)
    entries = [
        EntryPoint("one", "demo_plugin:first", GROUP),
        EntryPoint("two", "demo_plugin:second", GROUP),
        EntryPoint("broken", "no_such_module:f", GROUP),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group == GROUP else [])
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    import demo_plugin  # type: ignore[import-not-found]

    calls: list[str] = demo_plugin.calls
    return calls


def test_all_are_called_once(installed: list[str]) -> None:
    plugins.load_general_plugins()
    plugins.load_general_plugins()
    assert installed == ["first", "second"]


@pytest.mark.parametrize(
    ("allowed", "calls"), [("two", ["second"]), ("", []), ("x,one", ["first"])]
)
def test_filter(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, allowed: str, calls: list[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    plugins.load_general_plugins()
    assert installed == calls


def test_a_wanted_plugin_must_load(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "broken")
    with pytest.raises(ImportError, match="'broken'.*no_such_module"):
        plugins.load_general_plugins()


def test_a_plugin_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("config")

    monkeypatch.setattr(plugins, "load_plugins_by_group", lambda _: {"mine": fail})
    monkeypatch.setattr(plugins, "_loaded", False)
    with pytest.raises(RuntimeError, match=r"plugin 'mine' .*KeyError\('config'\)"):
        plugins.load_general_plugins()


def test_a_wanted_plugin_that_is_not_installed(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "one,tow")
    with caplog.at_level("WARNING", logger=plugins.logger.name):
        plugins.load_general_plugins()
    assert "VLLM_PLUGINS names tow, which no installed package has" in caplog.text
    assert "broken, one, two" in caplog.text


def test_groups_are_separate(installed: list[str]) -> None:
    assert set(plugins.load_plugins_by_group(GROUP)) == {"one", "two"}
    assert plugins.load_plugins_by_group(plugins.STAT_LOGGER_PLUGINS_GROUP) == {}
