# SPDX-License-Identifier: Apache-2.0
"""Hash functions of the prefix cache (`--prefix-caching-hash-algo`).

The `_cbor` variants hash canonical CBOR, so that other languages and Python versions can compute
the same value; the others hash a pickle and are faster. `xxhash` is 128 bits wide, fast and not
collision-resistant: do not use it where clients are not trusted.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

HashFunction = Callable[[object], bytes]


def _xxh3_128(data: bytes) -> bytes:
    import xxhash as library

    return library.xxh3_128_digest(data)


def _canonical_cbor(value: object) -> bytes:
    import cbor2

    return cbor2.dumps(value, canonical=True)


def sha256(value: object) -> bytes:
    """SHA-256 of the pickled value, 32 bytes."""
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def sha256_cbor(value: object) -> bytes:
    """SHA-256 of the value in canonical CBOR, 32 bytes; needs `cbor2`."""
    return hashlib.sha256(_canonical_cbor(value)).digest()


def xxhash(value: object) -> bytes:
    """XXH3-128 of the pickled value, 16 bytes; needs `xxhash`."""
    return _xxh3_128(pickle.dumps(value, protocol=5))


def xxhash_cbor(value: object) -> bytes:
    """XXH3-128 of the value in canonical CBOR, 16 bytes; needs `xxhash` and `cbor2`."""
    return _xxh3_128(_canonical_cbor(value))


_FUNCTIONS: dict[str, HashFunction] = {
    f.__name__: f for f in (sha256, sha256_cbor, xxhash, xxhash_cbor)
}


def get_hash_fn_by_name(name: str) -> HashFunction:
    """The function named by `--prefix-caching-hash-algo`; `ValueError` for another name."""
    if name not in _FUNCTIONS:
        raise ValueError(f"unknown hash algorithm {name!r}; choose one of {sorted(_FUNCTIONS)}")
    return _FUNCTIONS[name]
