# SPDX-License-Identifier: Apache-2.0
"""From text of the command line to values."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_NUMBER = re.compile(r"(-?\d+)(?:\.(\d+))?(?:([kKmMgGtT]?)|([KMGT])i)")


def human_int(text: str) -> int:
    """`8192`, `8k` (8000), `8K` or `8Ki` (8192), `25.6k` (25600); also m/M, g/G, t/T.

    Raises `argparse.ArgumentTypeError` for other text and for values that are not whole.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer; write 8192, 8k (8000) or 8K (8192)"
        )
    whole, fraction, suffix, binary = match.groups()
    digits = fraction or ""
    scaled = int(whole + digits) * _FACTORS[binary or suffix]
    if scaled % 10 ** len(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return scaled // 10 ** len(digits)


def length(text: str) -> int:
    """`human_int`, or `auto` (-1)."""
    return -1 if text == "auto" else human_int(text)


def json_value(text: str) -> Any:
    """A JSON document; `argparse.ArgumentTypeError` says where it is broken."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}; got {text!r}") from None


def optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """`convert`, except that the empty text and `None` mean no value."""

    def parse(text: str) -> Any:
        return None if text in ("", "None") else convert(text)

    parse.__name__ = getattr(convert, "__name__", "value")
    return parse


def json_or_text(text: str) -> Any:
    """The value of a dotted flag: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
