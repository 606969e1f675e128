# SPDX-License-Identifier: Apache-2.0
"""Ids of requests inside the engine; connectors use them as file names and keys."""

import re
import secrets
import string

from vllm import envs

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_CHARS = 128
_ALPHABET = string.ascii_lowercase + string.digits


def make_internal_id(external_id: str) -> str:
    """The caller's id with unsafe characters replaced, cut to 128, and 8 random characters added
    (none with `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`)."""
    safe = _UNSAFE.sub("_", external_id)[:_MAX_CHARS]
    if safe in ("", ".", ".."):
        safe = f"request{safe.replace('.', '_')}"
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return safe
    return f"{safe}-{''.join(secrets.choice(_ALPHABET) for _ in range(8))}"
