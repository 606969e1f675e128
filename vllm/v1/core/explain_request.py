# SPDX-License-Identifier: Apache-2.0
"""What one request costs in a planned arena, how many fit, and where the bytes of a full one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.arena_sizing import largest, pages_per_request
from vllm.v1.kv_cache_interface import ArenaPlan, KVCacheGroupSpec

#: tokens; `--block-size` takes multiples of it
SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class RequestCost:
    """A request of `num_tokens` at its fullest moment.

    `blocks` per group (of a window the most that admission counts on); `num_bytes`: their strides;
    `pages`: what an empty arena gives it. `sequences` such requests fit at once; `ideal_sequences`
    would if every byte of the memory held state.
    """

    num_tokens: int
    blocks: tuple[int, ...]
    num_bytes: int
    pages: int
    sequences: int
    ideal_sequences: float

    @property
    def tokens(self) -> int:
        """Tokens of all requests that fit."""
        return self.sequences * self.num_tokens


@dataclass(frozen=True)
class Waste:
    """`num_bytes` that hold no state, why, and the flag that changes it (None: none does)."""

    what: str
    num_bytes: int
    flag: str | None


@dataclass(frozen=True)
class ByteUse:
    """An arena full of requests of `num_tokens`: `state_bytes` per group, and everything else.

    The parts add up to the memory exactly. `left_bytes`: too little for one more such request, but
    good for shorter ones.
    """

    num_tokens: int
    state_bytes: tuple[int, ...]
    wastes: tuple[Waste, ...]
    left_bytes: int

    @property
    def largest_waste(self) -> Waste:
        return max(self.wastes, key=lambda waste: waste.num_bytes)


def cost_of_request(
    groups: Sequence[KVCacheGroupSpec],
    arena: ArenaPlan,
    max_num_batched_tokens: int,
    num_tokens: int,
    arena_bytes: int,
) -> RequestCost:
    """The cost by the allocator's own rules (`arena_sizing`); `arena_bytes`: the memory given."""
    blocks = tuple(
        group.kv_cache_spec.blocks_per_request(max_num_batched_tokens, num_tokens)
        for group in groups
    )

    def pages(sequences: int) -> int:
        total = sequences * num_tokens
        return pages_per_request(groups, arena, max_num_batched_tokens, total, num_tokens)

    most = arena.num_pages * max(plan.blocks_per_page for plan in arena.groups)
    state = sum(_state_bytes(group, num_tokens) for group in groups)
    return RequestCost(
        num_tokens=num_tokens,
        blocks=blocks,
        num_bytes=sum(n * arena.block_stride(i) for i, n in enumerate(blocks)),
        pages=pages(1),
        sequences=largest(most, lambda n: pages(n) < arena.num_pages),
        ideal_sequences=arena_bytes / state,
    )


def use_of_bytes(
    groups: Sequence[KVCacheGroupSpec], arena: ArenaPlan, arena_bytes: int, cost: RequestCost
) -> ByteUse:
    """Where `arena_bytes` go when as many requests as fit are as long as `cost` says."""
    n, page = cost.sequences, arena.page_bytes
    state, ends, slack, padding = [], 0, 0, 0
    for group_id, (group, blocks) in enumerate(zip(groups, cost.blocks, strict=True)):
        block = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        needed = -(-_state_bytes(group, cost.num_tokens) // block)
        state.append(n * _state_bytes(group, cost.num_tokens))
        ends += n * needed * block - state[-1]
        slack += n * (blocks - needed) * block
        padding += n * blocks * (arena.block_stride(group_id) - block)
    paged = [g.kv_cache_spec for g in groups if not g.kv_cache_spec.is_recurrent]
    can_shrink = any(spec.block_size > SMALLEST_BLOCK for spec in paged)
    wastes = (
        Waste("rows after the last token of a block", ends, "--block-size" if can_shrink else None),
        Waste("padding of blocks to page fractions", padding, "--block-size"),
        Waste("window blocks kept for a whole step", slack, "--max-num-batched-tokens"),
        Waste("the null page", page, None),
        Waste("memory after the last whole page", arena_bytes - arena.num_pages * page, None),
    )
    left = (arena.num_pages - 1) * page - n * cost.num_bytes
    return ByteUse(cost.num_tokens, tuple(state), wastes, left)


def _state_bytes(group: KVCacheGroupSpec, num_tokens: int) -> int:
    """Bytes of the tokens (or states) that are needed after `num_tokens` tokens."""
    spec = group.kv_cache_spec
    data = spec.page_size_bytes * len(group.layer_names)
    if spec.is_recurrent:
        return data * spec.blocks_for(num_tokens)
    kept = num_tokens if spec.window is None else min(num_tokens, spec.window)
    return data * kept // spec.block_size
