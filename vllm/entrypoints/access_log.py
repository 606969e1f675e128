# SPDX-License-Identifier: Apache-2.0
"""Logging of the HTTP server: uvicorn's loggers in our format, some paths left out."""

import json
import logging
import logging.config
from typing import Any

from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import DATE_FORMAT, FORMAT, RecordFormatter, explain

_ACCESS = "uvicorn.access"


class WithoutPaths(logging.Filter):
    """Drops access log records of the given paths; uvicorn's third argument is path and query."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) < 3:
            return True
        return str(record.args[2]).partition("?")[0] not in self.paths


def set_up_logging(args: FrontEndArgs) -> None:
    """Log in this process as `log_config` says; `VLLMValidationError` where a file says what cannot
    be done."""
    try:
        logging.config.dictConfig(log_config(args))
    except (ValueError, TypeError, AttributeError) as error:
        raise _file_error(args, explain(error)) from None


def log_config(args: FrontEndArgs) -> dict[str, Any]:
    """For `logging.config.dictConfig`; raises `VLLMValidationError` for an unreadable file."""
    if args.log_config_file:
        try:
            with open(args.log_config_file, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError) as error:
            raise _file_error(args, str(error)) from None
        if not isinstance(content, dict):
            raise _file_error(args, "expected a JSON object for logging.config.dictConfig")
        return content
    hidden = [p.strip() for p in (args.disable_access_log_for_endpoints or "").split(",")]
    level = args.uvicorn_log_level.upper()
    level = "DEBUG" if level == "TRACE" else level
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"paths": {"()": WithoutPaths, "paths": [p for p in hidden if p]}},
        "formatters": {"line": {"()": RecordFormatter, "fmt": FORMAT, "datefmt": DATE_FORMAT}},
        "handlers": {
            "server": {"class": "logging.StreamHandler", "formatter": "line"},
            "access": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "filters": ["paths"],
            },
        },
        "loggers": {
            "uvicorn": {"handlers": ["server"], "level": level, "propagate": False},
            _ACCESS: {"handlers": ["access"], "level": level, "propagate": False},
        },
    }


def _file_error(args: FrontEndArgs, reason: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"--log-config-file {args.log_config_file}: {reason}", "log_config_file"
    )
