# SPDX-License-Identifier: Apache-2.0
"""The connector under test, and how its store is damaged."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.testing.connectors.layouts import LAYOUTS
from vllm.testing.connectors.state import MAX_RANKS

#: how data goes bad on its way: a flipped bit, missing, cut off, the store out of reach
DAMAGES = ("corrupt", "drop", "short", "disconnect")

#: `(scheduler side, worker side, storage, damage)` -> whether there was anything to damage. Of
#: several workers it gets one: what the others keep is better left whole
Damage = Callable[[KVConnectorBase_V1, KVConnectorBase_V1, Path, str], bool]
#: name -> what it means
VIOLATIONS = {
    "metadata-not-picklable": "build_connector_meta's result does not survive pickling",
    "step-changed": "build_connector_meta changed the scheduler's output",
    "matched-too-much": "get_num_new_matched_tokens found more tokens than the request has",
    "wrong-bits": "state that was loaded is not what had been computed for these tokens",
    "broken-data-decoded": "damaged data was used without a reported load error",
    "not-recomputed": "a request whose load failed did not end with the tokens of computing it",
    "wait-hangs": "wait_for_transfers did not return within its time",
    "never-settles": "a request, a transfer or has_pending_push_work never ends",
    "blocks-leaked": "blocks are held although no request is left",
    "descriptors-leaked": "file descriptors are open after shutdown",
    "threads-leaked": "threads run after shutdown",
    "raised": "a call raised an exception",
    "nothing-loaded": "a prompt that was stored was not found again",
}


class ContractViolation(AssertionError):
    """`name`: a key of `VIOLATIONS`."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {VIOLATIONS[name]}: {detail}")
        self.name = name


def damage_files(
    scheduler: KVConnectorBase_V1, worker: KVConnectorBase_V1, storage: Path, damage: str
) -> bool:
    """Damage every file below `storage`, but those that are still being written: `*.partial`, and
    hidden ones with what is in hidden directories."""
    files = []
    for folder, directories, names in os.walk(storage):
        directories[:] = [name for name in directories if not name.startswith(".")]
        files += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and not name.endswith((".json", ".lock", ".partial"))
        ]
    for path in files:
        if damage in ("drop", "disconnect"):
            path.unlink(missing_ok=True)
        elif data := bytearray(path.read_bytes()):
            data[-1] ^= 1
            # Another file in its place: one that got shorter would kill a reader that maps it.
            damaged = path.with_name(f".{path.name}")
            damaged.write_bytes(data[: len(data) // 2] if damage == "short" else data)
            damaged.replace(path)
    return bool(files)


@dataclass
class ConnectorCase:
    """`config`: a `kv_transfer_config`; `{storage}` in its strings becomes a directory of the test.
    `kinds`: kinds of models it serves, of `vllm.testing.connectors.layouts.LAYOUTS`.
    `damage`: how the test damages what it stored. `loads`: whether it brings prompts back.
    `num_workers`: tensor-parallel ranks, each with an arena and a worker side.

    ValueError for what is none of these."""

    config: dict[str, Any]
    kinds: tuple[str, ...] = ("attention", "window", "hybrid")
    damage: Damage = damage_files
    loads: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.config, dict):
            raise ValueError(f"config {self.config!r}: a JSON object, as kv_transfer_config is")
        unknown = [kind for kind in self.kinds if kind not in LAYOUTS]
        if unknown or not self.kinds:
            raise ValueError(f"kinds {', '.join(unknown) or 'none'}: among {', '.join(LAYOUTS)}")
        if not 1 <= self.num_workers <= MAX_RANKS:
            raise ValueError(f"num_workers {self.num_workers}: 1 to {MAX_RANKS}")

    def transfer_config(self, storage: Path, policy: str) -> dict[str, Any]:
        """The configuration for one engine."""
        config = _with_storage(copy.deepcopy(self.config), str(storage))
        assert isinstance(config, dict)
        return {"kv_role": "kv_both", **config, "kv_load_failure_policy": policy}


def _with_storage(value: Any, storage: str) -> Any:
    if isinstance(value, str):
        return value.replace("{storage}", storage)
    if isinstance(value, dict):
        return {key: _with_storage(item, storage) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_storage(item, storage) for item in value]
    return value
