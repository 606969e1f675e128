# SPDX-License-Identifier: Apache-2.0
"""Small pieces of JSON text, read and written without surprises."""

import json
from typing import Any, NoReturn


def decode_string(text: str) -> str | None:
    """The string that JSON `text` stands for; None if it is none, or not encodable as UTF-8."""
    try:
        value = json.loads(text, strict=False)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return str(value)


def encode_string(text: str) -> str:
    """JSON of a string, with quotes; characters outside ASCII stay readable."""
    return json.dumps(text, ensure_ascii=False)


def encode_piece(text: str) -> str:
    """A part of a string as it stands between the quotes; the encoding goes by characters."""
    return encode_string(text)[1:-1]


def parse_json(text: str) -> Any:
    """The value of strict JSON `text` (no NaN); ValueError for anything else."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
