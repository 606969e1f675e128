# SPDX-License-Identifier: Apache-2.0
"""Entry-point plugins. General plugins run in every process and must be re-entrant."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
PLATFORM_PLUGINS_GROUP = "vllm.platform_plugins"
IO_PROCESSOR_PLUGINS_GROUP = "vllm.io_processor_plugins"
STAT_LOGGER_PLUGINS_GROUP = "vllm.stat_logger_plugins"

_loaded = False


def load_plugins_by_group(group: str) -> dict[str, Callable[[], Any]]:
    """The entry points of `group` allowed by `VLLM_PLUGINS`, imported: name -> callable.

    A plugin that fails to import is logged with its error and left out; one named in
    `VLLM_PLUGINS` was asked for, so its failure raises `ImportError`.
    """
    allowed = envs.VLLM_PLUGINS
    plugins: dict[str, Callable[[], Any]] = {}
    for entry in entry_points(group=group):
        if allowed is not None and entry.name not in allowed:
            continue
        try:
            plugins[entry.name] = entry.load()
        except Exception as error:
            if allowed is not None:
                raise ImportError(f"plugin {entry.name!r} ({entry.value}): {error}") from error
            logger.exception("plugin %r (%s) could not be loaded", entry.name, entry.value)
    return plugins


def load_general_plugins() -> None:
    """Call every general plugin, once per process; later calls do nothing.

    RuntimeError for one that raises.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True
    _warn_of_unknown()
    for name, plugin in load_plugins_by_group(DEFAULT_PLUGINS_GROUP).items():
        logger.info("running plugin %s", name)
        try:
            plugin()
        except Exception as error:
            raise RuntimeError(f"plugin {name!r} failed: {error!r}") from error


def _warn_of_unknown() -> None:
    """Say which names in `VLLM_PLUGINS` no installed package has."""
    groups = (
        DEFAULT_PLUGINS_GROUP,
        PLATFORM_PLUGINS_GROUP,
        IO_PROCESSOR_PLUGINS_GROUP,
        STAT_LOGGER_PLUGINS_GROUP,
    )
    installed = {entry.name for group in groups for entry in entry_points(group=group)}
    unknown = [name for name in envs.VLLM_PLUGINS or [] if name not in installed]
    if unknown:
        logger.warning(
            "VLLM_PLUGINS names %s, which no installed package has; installed: %s",
            ", ".join(unknown),
            ", ".join(sorted(installed)) or "none",
        )
