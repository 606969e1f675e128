# SPDX-License-Identifier: Apache-2.0
"""The chunks in which prefills run the gated delta rule, listed on the host once per step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: tokens of a chunk; the last of a sequence may have fewer
CHUNK = 64


def fill_chunks(
    query_start_loc: np.ndarray,
    indices: np.ndarray,
    offsets: np.ndarray,
    *,
    num_seqs: int,
    num_chunks: int,
) -> int:
    """List the chunks of a batch that starts at `query_start_loc [n + 1]`; returns how many.

    `offsets [>= num_seqs + 1]`: each sequence's first chunk; sequences after the n-th have none.
    `indices [>= num_chunks, 2]`: (sequence, chunk in sequence), then up to `num_chunks` chunks of
    the last of `num_seqs`. Both must have room for what is real.
    """
    counts = -(-np.diff(query_start_loc) // CHUNK)
    real = len(counts)
    offsets[0] = 0
    np.cumsum(counts, out=offsets[1 : real + 1])
    total = int(offsets[real])
    offsets[real + 1 : num_seqs + 1] = total
    sequence = np.repeat(np.arange(real), counts)
    indices[:total, 0] = sequence
    indices[:total, 1] = np.arange(total) - offsets[sequence]
    indices[total:num_chunks] = (num_seqs - 1, 0)
    return total


def chunk_metadata(query_start_loc: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of a batch: `(chunk_indices [chunks, 2], chunk_offsets [n + 1])`, int32 CPU tensors; see
    `GdnPrefill`."""
    starts = np.asarray(query_start_loc, dtype=np.int32)
    num_seqs = len(starts) - 1
    offsets = np.empty(num_seqs + 1, dtype=np.int32)
    indices = np.empty((int(-(-np.diff(starts) // CHUNK).sum()), 2), dtype=np.int32)
    fill_chunks(starts, indices, offsets, num_seqs=num_seqs, num_chunks=len(indices))
    return torch.from_numpy(indices), torch.from_numpy(offsets)
