# SPDX-License-Identifier: Apache-2.0
"""Logging: one handler for the `vllm` tree, level from `VLLM_LOGGING_LEVEL`."""

import json
import logging
import logging.config
import os
import sys

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"
#: begins every line of a record but its first
_CONTINUED = "\n    | "
#: of `VLLM_LOGGING_LEVEL`
LEVELS = ("CRITICAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG")
_configured = False
_problem = ""


class RecordFormatter(logging.Formatter):
    """Only a record's first line begins at the margin, and characters that a terminal would act on
    are written as escapes: messages quote what clients send."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.isprintable():
            return text
        return _CONTINUED.join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line
    )


def _configure() -> None:
    global _configured
    if _configured:
        return
    _configured = True
    if os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "0":
        return
    if not _configure_from_file(os.environ.get("VLLM_LOGGING_CONFIG_PATH")):
        _configure_handler()


def _configure_from_file(path: str | None) -> bool:
    """Whether the file is there and right; what is wrong with it is remembered."""
    global _problem
    if not path:
        return False
    try:
        with open(path, encoding="utf-8") as f:
            logging.config.dictConfig(json.load(f))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _problem = f"environment variable VLLM_LOGGING_CONFIG_PATH={path!r}: {explain(error)}"
        return False
    return True


def explain(error: Exception) -> str:
    """An error of `logging.config.dictConfig`, whose causes say more than it does."""
    causes = [str(error)]
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
        causes.append(str(error))
    return ": ".join(causes)


def _configure_handler() -> None:
    prefix = os.environ.get("VLLM_LOGGING_PREFIX", "")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter(prefix + FORMAT, DATE_FORMAT))
    root = logging.getLogger("vllm")
    root.addHandler(handler)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    # What is no level is refused by `envs.check_variables`, which says which ones there are.
    root.setLevel(level if level in LEVELS else "INFO")
    root.propagate = False


def configuration_problem() -> str:
    """What is wrong with the file of `VLLM_LOGGING_CONFIG_PATH`; found when this is imported, where
    an error would hide that it is about the environment. Empty if nothing is."""
    _configure()
    return _problem


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is the module's `__name__`."""
    _configure()
    return logging.getLogger(name)
