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
_configured = False


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
    path = os.environ.get("VLLM_LOGGING_CONFIG_PATH")
    if path:
        with open(path, encoding="utf-8") as f:
            logging.config.dictConfig(json.load(f))
        return
    prefix = os.environ.get("VLLM_LOGGING_PREFIX", "")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter(prefix + FORMAT, DATE_FORMAT))
    root = logging.getLogger("vllm")
    root.addHandler(handler)
    root.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is the module's `__name__`."""
    _configure()
    return logging.getLogger(name)
