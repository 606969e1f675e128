# SPDX-License-Identifier: Apache-2.0
"""Seals of transferred state: a digest made as bytes leave, checked as they arrive.

The digest is XXH3-64, which finds damage, not forgery. Bytes that do not have it are never decoded.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor


class SealBroken(ValueError):
    """Data is not what was sealed; the message has both digests."""


def digest(data: Tensor | np.ndarray) -> int:
    """XXH3-64 of the bytes of a contiguous CPU tensor or array; other threads run meanwhile."""
    if isinstance(data, Tensor):
        data = data.view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(data.data)


def check(data: Tensor | np.ndarray, sealed: int, what: str) -> None:
    """Raise `SealBroken` unless `data` has the digest it was sealed with."""
    found = digest(data)
    if found != sealed:
        raise SealBroken(f"{what}: sealed with digest {sealed:016x}, arrived with {found:016x}")
