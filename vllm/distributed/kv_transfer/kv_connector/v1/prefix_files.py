# SPDX-License-Identifier: Apache-2.0
"""Names and files of stored prefixes: one directory per prefix and rank, one file per layer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1 import seal

_KEY = "kv_cache"
_SEAL = "xxh3_64"


def aligned_length(num_tokens: int, alignment: int) -> int:
    """Tokens of whole blocks that leave at least one token of the prompt to compute."""
    return max(num_tokens - 2, 0) // alignment * alignment


class PrefixStore:
    """Prefixes in `directory`; `scope` is everything besides the tokens that fixes the values.

    Each of `num_ranks` workers stores its own part of a prefix.
    """

    def __init__(self, directory: str, scope: dict[str, str], num_ranks: int = 1) -> None:
        self._directory = directory
        self._num_ranks = num_ranks
        self._scope = json.dumps(scope, sort_keys=True)

    def folder(self, token_ids: Sequence[int], salt: str | None) -> str:
        """Where the prefix of exactly `token_ids` is or would be stored; see `part`."""
        text = json.dumps([self._scope, salt, list(token_ids)])
        return os.path.join(self._directory, hashlib.sha256(text.encode()).hexdigest())

    def part(self, folder: str, rank: int) -> str:
        """The rank's folder of a prefix."""
        return folder if self._num_ranks == 1 else f"{folder}.{rank}of{self._num_ranks}"

    def has(self, folder: str) -> bool:
        """Whether every rank has stored its part."""
        return all(os.path.isdir(self.part(folder, rank)) for rank in range(self._num_ranks))

    @staticmethod
    def load(folder: str, layer_name: str) -> Tensor:
        """The layer's blocks, `[blocks, ...]` on the CPU; OSError or ValueError if they are not
        what was stored."""
        path = os.path.join(folder, f"{layer_name}.safetensors")
        try:
            with safe_open(path, framework="pt") as file:
                blocks, sealed = file.get_tensor(_KEY), int(file.metadata()[_SEAL], 16)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        seal.check(blocks, sealed, path)
        return blocks

    @staticmethod
    def save(folder: str, layers: dict[str, Tensor]) -> None:
        """Store all layers; the folder appears complete or not at all."""
        if os.path.isdir(folder):
            return
        temporary = f"{folder}.{uuid.uuid4().hex}.partial"
        os.makedirs(temporary)
        try:
            for name, blocks in layers.items():
                path = os.path.join(temporary, f"{name}.safetensors")
                data = blocks.contiguous()
                save_file({_KEY: data}, path, {_SEAL: f"{seal.digest(data):016x}"})
            os.rename(temporary, folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not os.path.isdir(folder):
                raise
