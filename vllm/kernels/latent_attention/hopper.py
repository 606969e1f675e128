# SPDX-License-Identifier: Apache-2.0
"""Absorbed latent attention in CUDA C++ for Hopper: `csrc/cuda/hopper/latent_attention.cu`.

It takes bfloat16 latents of 512 with 64 shared dimensions, as all models with such attention have
them, and any number of heads and queries.
"""

from functools import cache

import torch
from torch import Tensor

from vllm.kernels.attention.triton_tile import LOG2_E
from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.latent_attention.triton import absorbed, memory_of_shares
from vllm.kernels.registry import Implementation
from vllm.kernels.triton.configs import device_configs
from vllm.utils.math_utils import cdiv

LATENT, SHARED = 512, 64
#: rows of a query, its tokens times heads, that share what is read: few, or more
FEW_ROWS, MANY_ROWS = 32, 64
#: shares of a sequence, and keys that are worth one
MAX_SHARES, SHARE_KEYS = 32, 256
#: keys that take as long as a share's start and end
START_KEYS = 192
#: numbers that shares on their way to be joined may take
SHARED_NUMBERS = 16 * 2**20
_BLOCK_STEP = 16


def takes_latents(p: LatentAttentionProblem) -> bool:
    """Whether the op takes this on the problem's GPU."""
    return (
        p.query.dtype == p.cache.dtype == torch.bfloat16
        and not p.is_empty
        and (p.latent, p.shared) == (LATENT, SHARED)
        and p.block_size % _BLOCK_STEP == 0
        and _at_16_bytes(p.cache)
        and _at_16_bytes(p.query[..., p.nope :])
    )


def _at_16_bytes(rows: Tensor) -> bool:
    outer, inner, element = rows.stride()
    return element == 1 and outer % 8 == inner % 8 == rows.storage_offset() % 8 == 0


@cache
def num_shares(tiles: int, max_seq_len: int, row_numbers: int, chip: int) -> int:
    """The most shares of a sequence: those with which the shares of sequences as long as the
    longest take least time. All sequences together have so many `tiles` of rows, each of which is
    one multiprocessor's for a share; `row_numbers`: of all their outputs.

    From host integers only, so neither other sequences' lengths nor graph replay change a bit.
    """
    most = min(MAX_SHARES, cdiv(max_seq_len, SHARE_KEYS), SHARED_NUMBERS // row_numbers)

    def keys_in_turn(shares: int) -> int:
        return cdiv(tiles * shares, chip) * (cdiv(max_seq_len, shares) + START_KEYS)

    return min(range(1, most + 1), key=keys_in_turn, default=1)


def attend_to_latents(p: LatentAttentionProblem, query: Tensor) -> Tensor:
    """As `triton.attend_to_latents`."""
    rows = p.max_query_len * p.num_heads
    tile_rows = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
    tiles = p.num_seqs * cdiv(rows, tile_rows)
    chip = device_configs(query.device).multiprocessors
    splits = num_shares(tiles, p.max_seq_len, p.num_tokens * p.num_heads * LATENT, chip)
    out = torch.empty_like(query)
    part, lse = memory_of_shares(p, splits)
    torch.ops.vllm_cuda.latent_attention.default(
        query,
        p.query[..., p.nope :],
        p.cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        out,
        part,
        lse,
        p.max_query_len,
        tile_rows,
        splits,
        SHARE_KEYS,
        p.scale * LOG2_E,
    )
    return out


def hopper_latent_attention(p: LatentAttentionProblem) -> None:
    """Fill `p.out`, where `takes_latents`."""
    absorbed(p, attend_to_latents)


OPS = CudaOps(
    what="attention to latents",
    why="reads latents nearer to the memory's speed",
    instead_of="Triton",
    chosen=f"vllm_cuda for bfloat16 latents of {LATENT} and {SHARED}, Triton for others",
)
latent_attention = Implementation(hopper_latent_attention, takes_latents, OPS)
