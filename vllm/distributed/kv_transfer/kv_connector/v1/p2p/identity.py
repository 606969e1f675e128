# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common to exchange state, compared field by field."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import xxhash

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import state_identity
from vllm.v1.kv_cache_interface import KVCacheConfig

#: raised whenever the messages or what they mean change
PROTOCOL = 2
#: bytes at the end of every file of weights that say which training run wrote it
_TAIL_BYTES = 64 * 1024
#: characters of a value that an error shows
_MAX_SHOWN = 500
#: differ between copies of one checkpoint and change nothing
_CONFIG_NOISE = ("_name_or_path", "transformers_version")

Identity = dict[str, Any]


class HandshakeRefused(RuntimeError):
    """Two engines must not exchange state; the message names the field they differ in."""


def peer_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> Identity:
    """This engine's side of the comparison; JSON values."""
    speculative = vllm_config.speculative_config
    identity = {
        "protocol": PROTOCOL,
        "model_config": _config_digest(vllm_config.model_config.hf_config.to_dict()),
        "weights": _weights(vllm_config),
        "captured_layers": (
            speculative.extraction_layer_ids
            if speculative is not None and speculative.uses_extract_hidden_states()
            else None
        ),
        "hash_seed": _seed_digest(os.environ.get("PYTHONHASHSEED")),
        **state_identity(vllm_config, config),
    }
    return json.loads(json.dumps(identity))


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


def _seed_digest(seed: str | None) -> str | None:
    """Whoever knows the seed can prepare names of prefixes, so it does not travel."""
    return None if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:16]


def _config_digest(config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _weights(vllm_config: VllmConfig) -> list[Any]:
    """Of a local checkpoint each file's name, size and the digest of its last bytes; paths and
    times differ between machines. Of any other its name."""
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return [load_format, model.seed]
    directory = Path(str(model.model))
    if not directory.is_dir():
        return [str(model.model), str(model.revision)]
    return [_tail(path) for path in sorted(directory.glob("*.safetensors"))]


def _tail(path: Path) -> list[Any]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return [path.name, size, xxhash.xxh3_64_hexdigest(file.read())]
