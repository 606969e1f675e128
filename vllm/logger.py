# SPDX-License-Identifier: Apache-2.0
"""Logging: one handler for the `vllm` tree, level from `VLLM_LOGGING_LEVEL`."""

import json
import logging
import logging.config
import os
import sys

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_configured = False


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
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%m-%d %H:%M:%S"))
    root = logging.getLogger("vllm")
    root.addHandler(handler)
    root.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is the module's `__name__`."""
    _configure()
    return logging.getLogger(name)
