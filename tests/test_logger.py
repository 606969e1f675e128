# SPDX-License-Identifier: Apache-2.0
"""What clients send cannot pass for a line of the log, nor reach a terminal as a command."""

from __future__ import annotations

import logging
import logging.config
import sys

import pytest

from vllm.entrypoints.access_log import log_config
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.logger import RecordFormatter, init_logger

FORMATTER = RecordFormatter("%(levelname)s %(message)s")


def shown(message: str, *args: object) -> str:
    record = logging.LogRecord("vllm.x", logging.INFO, __file__, 1, message, args, None)
    return FORMATTER.format(record)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plain text, Grüße \N{SNOWMAN}", "plain text, Grüße \N{SNOWMAN}"),
        ("a\tb", "a\tb"),
        ("a\nERROR forged", "a\n    | ERROR forged"),
        ("a\r\nERROR forged", "a\\r\n    | ERROR forged"),
        ("\x1b[2Jgone\x07\x00\x7f\x9b", "\\x1b[2Jgone\\x07\\x00\\x7f\\x9b"),
        ("a\x0bb\x0cc\x85d\u2028e\u2029f", "a\\x0bb\\x0cc\\x85d\\u2028e\\u2029f"),
        ("\ud800 \u202eabc", "\\ud800 \\u202eabc"),
    ],
)
def test_a_record_is_recognised_by_its_first_line(given: str, expected: str) -> None:
    assert shown("request %s", given) == f"INFO request {expected}"


def test_errors_are_part_of_their_record() -> None:
    try:
        raise ValueError("bad value 'a\nERROR forged'")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    first, *rest = FORMATTER.format(record).split("\n")
    assert first == "ERROR failed" and len(rest) > 2
    assert all(line.startswith("    | ") for line in rest)
    assert "Traceback" in rest[0]


def test_the_engine_and_the_server_use_it() -> None:
    init_logger("vllm.x")
    handlers = logging.getLogger("vllm").handlers
    assert any(isinstance(handler.formatter, RecordFormatter) for handler in handlers)
    built = logging.config.DictConfigurator(log_config(FrontEndArgs()))
    formatter = built.configure_formatter(built.config["formatters"]["line"])
    assert isinstance(formatter, RecordFormatter)
    record = logging.LogRecord("uvicorn", logging.INFO, __file__, 1, "a\nb", (), None)
    assert formatter.format(record).endswith("[uvicorn] a\n    | b")
