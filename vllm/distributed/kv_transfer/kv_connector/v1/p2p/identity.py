# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common to exchange state, compared field by field."""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import state_identity
from vllm.v1.kv_cache_interface import KVCacheConfig

#: raised whenever the messages or what they mean change
PROTOCOL = 3
#: characters of a value that an error shows
_MAX_SHOWN = 500

Identity = dict[str, Any]
#: the field that changes while an engine runs (`weights_identity`); every description of a state
#: has it, too
WEIGHTS = "weights"


class HandshakeRefused(RuntimeError):
    """Two engines must not exchange state; the message names the field they differ in."""


def peer_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> Identity:
    """This engine's side of the comparison; JSON values."""
    return {"protocol": PROTOCOL, **state_identity(vllm_config, config)}


def compare(mine: Identity, theirs: Identity, peer: str) -> None:
    """Raise `HandshakeRefused` with the first field that differs."""
    found = _first_difference(mine, theirs, "")
    if found is not None:
        field, here, there = found
        raise HandshakeRefused(
            f"{peer} keeps other state than this engine: {field} is {_short(here)} here and "
            f"{_short(there)} there; start both with the same model, settings and version"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _first_difference(mine: Any, theirs: Any, path: str) -> tuple[str, Any, Any] | None:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            name = f"{path}.{key}" if path else key
            if key not in mine or key not in theirs:
                return name, mine.get(key), theirs.get(key)
            if (found := _first_difference(mine[key], theirs[key], name)) is not None:
                return found
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            if (found := _first_difference(one, other, f"{path}[{i}]")) is not None:
                return found
    elif mine != theirs:
        return path, mine, theirs
    return None
