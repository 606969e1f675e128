# SPDX-License-Identifier: Apache-2.0
"""The file tier: one file per block, named by its content, sealed, complete or absent.

    <root>/<identity>/config.json                what fixes the content besides the tokens
    <root>/<identity>/r<rank>/<3 hex>/<name>.bin   header, then the block's bytes

`<name>` is `g<group>-<hash>` for a full block, and for a tail
`g<group>-<hash>-<parent hash>-<length>`, so that a directory listing rebuilds the index.
"""

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import (
    checkpoint_files,
    checkpoints,
    state_identity,
)
from vllm.distributed.kv_transfer.kv_connector.v1.seal import SealBroken
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    Tail,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

#: magic, digest of the data, bytes of the data
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"vllmblk1"


def file_name(key: BlockHashWithGroupId, tail: Tail | None) -> str:
    """The name of a block's file, without directory and suffix."""
    name = f"g{get_group_id(key)}-{get_block_hash(key).hex()}"
    if tail is None:
        return name
    return f"{name}-{get_block_hash(tail.parent).hex()}-{tail.length}"


def parse_name(name: str) -> tuple[BlockHashWithGroupId, Tail | None]:
    """The inverse of `file_name`; ValueError for another name."""
    group, *parts = name.split("-")
    if not group.startswith("g") or len(parts) not in (1, 3):
        raise ValueError(f"{name!r} names no block")
    group_id = int(group[1:])
    key = make_block_hash_with_group_id(BlockHash(bytes.fromhex(parts[0])), group_id)
    if len(parts) == 1:
        return key, None
    parent = make_block_hash_with_group_id(BlockHash(bytes.fromhex(parts[1])), group_id)
    return key, Tail(key, parent, int(parts[2]))


class FileNames:
    """What an engine's files are called: as `file_name` says until `renew`, then as nobody else
    calls them, so that no other engine and no later start finds them."""

    def __init__(self) -> None:
        self._salt: bytes | None = None

    def renew(self) -> None:
        """The identity's state and that of files to come may differ from now on."""
        self._salt = os.urandom(32)

    def of(self, key: BlockHashWithGroupId, tail: Tail | None) -> str:
        """The name of a file to be written."""
        if self._salt is None:
            return file_name(key, tail)
        own = self._own(key)
        if tail is None:
            return file_name(own, None)
        return file_name(own, Tail(own, self._own(tail.parent), tail.length))

    def _own(self, key: BlockHashWithGroupId) -> BlockHashWithGroupId:
        assert self._salt is not None
        made = hashlib.sha256(self._salt + get_block_hash(key)).digest()
        return make_block_hash_with_group_id(BlockHash(made), get_group_id(key))


class FileStore:
    """The files of one rank below `root`, all of one `identity`."""

    def __init__(self, root: str, identity: Mapping[str, Any], rank: int) -> None:
        text = json.dumps(identity, sort_keys=True)
        self._identity = text
        self._base = os.path.join(root, xxhash.xxh3_128_hexdigest(text.encode()))
        self._directory = os.path.join(self._base, f"r{rank}")
        try:
            os.makedirs(self._directory, exist_ok=True)
        except OSError as error:
            instead = f"cannot be made ({error.strerror}); name a directory that can be written"
            raise VLLMValidationError(
                f"OffloadingConnector: secondary_tiers[0].root_dir {root!r}: {instead}",
                parameter="root_dir",
                value=root,
            ) from error

    def hash_root(self) -> bytes:
        """The 32 random bytes that hashes of these files start from, made by the first engine."""
        path = os.path.join(self._base, "config.json")
        if not os.path.exists(path):
            made = {"identity": json.loads(self._identity), "hash_root": os.urandom(32).hex()}
            own = f"{path}.{uuid.uuid4().hex}"
            with open(own, "w", encoding="utf-8") as file:
                json.dump(made, file, indent=2)
            try:
                os.link(own, path)  # fails if another engine was first
            except FileExistsError:
                pass
            finally:
                os.unlink(own)
        with open(path, encoding="utf-8") as file:
            return bytes.fromhex(json.load(file)["hash_root"])

    def path(self, name: str) -> str:
        folder = name.partition("-")[2][:3]
        return os.path.join(self._directory, folder, f"{name}.bin")

    def names(self) -> Iterator[str]:
        """Every block there is, the one written or read longest ago first; what a writer that died
        left behind is removed."""
        found: list[tuple[float, str]] = []
        for folder in os.scandir(self._directory):
            for entry in os.scandir(folder.path) if folder.is_dir() else ():
                if entry.name.endswith(".partial"):
                    os.unlink(entry.path)
                elif entry.name.endswith(".bin"):
                    found.append((entry.stat().st_mtime, entry.name.removesuffix(".bin")))
        for _, name in sorted(found):
            yield name

    def write(self, name: str, data: np.ndarray, sealed: int) -> None:
        """Store `data`, `uint8 [bytes]`, with its digest; OSError if that is impossible."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        own = f"{path}.{uuid.uuid4().hex}.partial"
        try:
            with open(own, "wb") as file:
                file.write(_HEADER.pack(_MAGIC, sealed, data.nbytes))
                file.write(data.data)
            os.replace(own, path)
        except OSError:
            self._unlink(own)
            raise

    def read(self, name: str, target: np.ndarray) -> int:
        """Fill `target`, `uint8 [bytes]`, and return the digest the data was sealed with.

        OSError for a missing file, `SealBroken` for one that is too short or not a block's; whether
        the data has the digest is the caller's to check.
        """
        path = self.path(name)
        with open(path, "rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise SealBroken(f"{path}: {len(header)} bytes, shorter than its header")
            magic, sealed, num_bytes = _HEADER.unpack(header)
            if magic != _MAGIC or num_bytes != target.nbytes:
                raise SealBroken(f"{path}: not a block of {target.nbytes} bytes")
            view, done = target.data, 0
            while done < num_bytes:
                count = file.readinto(view[done:])
                if not count:
                    raise SealBroken(f"{path}: {done} of {num_bytes} bytes")
                done += count
        os.utime(path)
        return int(sealed)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._unlink(self.path(name))

    @staticmethod
    def _unlink(path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def store_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> dict[str, Any]:
    """What two engines must have in common to share files; JSON values.

    Times of change besides the shared part: another training run may write to the same directory.
    """
    return {
        **state_identity(vllm_config, config),
        "written": [
            [path.name, path.stat().st_mtime_ns]
            for checkpoint in checkpoints(vllm_config)
            for path in checkpoint_files(vllm_config, *checkpoint)
        ],
    }
