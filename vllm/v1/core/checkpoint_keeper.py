# SPDX-License-Identifier: Apache-2.0
"""Takes checkpoints of recurrent state, and starts requests from copies of them.

Copies happen on the device around a step, in order: those *before* it give a request its own copy
of what the cache found (what is copied from may be evicted at once: whoever writes there comes
later), those *after* it save states at the token count the step ended at. What a step saves can be
found from the next step on; until then its blocks are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.checkpoint_policy import CheckpointPolicy
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request


@dataclass(frozen=True)
class _Saved:
    """What a request that started at `start` leaves at `position`: `blocks[g]` ends that prefix in
    group `g`."""

    request: Request
    start: int
    position: int
    blocks: list[KVCacheBlock | None]


class CheckpointKeeper:
    """`state_bytes`: bytes of one block of every recurrent group together. `managers`: of the
    pool's groups from `first_group` on, which copies number from 0."""

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        pool: BlockPool,
        policy: CheckpointPolicy,
        state_bytes: int,
        first_group: int = 0,
    ) -> None:
        self.plans = CheckpointPlans(policy)
        self._managers = managers
        self._pool = pool
        self._policy = policy
        self._state_bytes = state_bytes
        self._first_group = first_group
        self._before: list[BlockCopy] = []
        self._after: list[BlockCopy] = []
        self._held: list[KVCacheBlock] = []
        self._saved: list[_Saved] = []
        #: token counts every running request's state was saved at
        self._taken: dict[str, list[int]] = {}
        #: the token count from which every running request computes
        self._starts: dict[str, int] = {}
        self._kept: dict[str, int] = {}

    # ---- around a step -------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The step before was sent: what it saves can be found, what it read is let go of."""
        for saved in self._saved:
            self._publish(saved)
        self._saved.clear()
        self._pool.free_blocks(self._held)
        self._held.clear()

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Copies to make before and after the step."""
        copies = self._before, self._after
        self._before, self._after = [], []
        return copies

    def take_kept(self) -> dict[str, int]:
        """`SchedulerOutput.kept_states` of the requests that left since the last step."""
        kept, self._kept = self._kept, {}
        return kept

    # ---- a request -----------------------------------------------------------------------------

    def begin(self, request: Request, num_computed_tokens: int) -> None:
        """The request has been given blocks and computes its tokens after these."""
        self._starts[request.request_id] = num_computed_tokens
        self.plans.announce(request)

    def start_from(
        self, request_id: str, sources: Sequence[KVCacheBlock | None], num_tokens: int
    ) -> None:
        """Copy what ends a found prefix of `num_tokens` into the request's own blocks, and let go
        of the sources."""
        for manager, source in zip(self._managers, sources, strict=True):
            if source is None:
                continue
            own = manager.block_at(request_id, num_tokens)
            # Tokens that a connector loads may have taken it out of a window.
            if own is not None:
                self._copy_before(manager, source, own)
            self._pool.free_blocks([source])

    def _copy_before(
        self, manager: SingleTypeKVCacheManager, source: KVCacheBlock, target: KVCacheBlock
    ) -> None:
        copy = BlockCopy(self._own(manager), source.block_id, target.block_id)
        self._before.append(copy)
        if self._pool.pages.journal is not None:
            of_all = BlockCopy(manager.group_id, copy.source, copy.target)
            self._pool.pages.journal.copied(of_all)

    def advance(self, request: Request, num_tokens: int) -> None:
        """The step being scheduled takes the request's state to `num_tokens`."""
        request.num_state_tokens = num_tokens
        if self.plans.is_due(request.request_id, num_tokens):
            self._save(request, num_tokens)

    def _own(self, manager: SingleTypeKVCacheManager) -> int:
        """Which of the managers' groups it is."""
        return manager.group_id - self._first_group

    def _save(self, request: Request, position: int) -> None:
        recurrent = [m.is_recurrent for m in self._managers]
        prefix = request.prefix_hash(position)
        exists = all(
            self._pool.get_cached_block(prefix, m.group_id) is not None
            for m, saves_state in zip(self._managers, recurrent, strict=True)
            if saves_state
        )
        demands = [int(saves_state) for saves_state in recurrent]
        if exists or not self._pool.can_allocate(demands, first_group=self._first_group):
            self.plans.done(request, position)
            return
        new = self._pool.get_new_blocks(demands, [None] * len(demands), self._first_group)
        ends: list[KVCacheBlock | None] = []
        for manager, blocks in zip(self._managers, new, strict=True):
            own = manager.block_at(request.request_id, position)
            if blocks:
                assert own is not None
                copy = BlockCopy(self._own(manager), own.block_id, blocks[0].block_id)
                self._after.append(copy)
                ends.append(blocks[0])
            else:
                if own is not None:
                    self._pool.touch([own])
                ends.append(own)
        self._held += [block for block in ends if block is not None]
        start = self._starts[request.request_id]
        self._saved.append(_Saved(request, start, position, ends))

    def _publish(self, saved: _Saved) -> None:
        request, position = saved.request, saved.position
        for manager, block in zip(self._managers, saved.blocks, strict=True):
            if block is not None:
                self._cache(manager, request, block, saved.start, position)
        if request.num_state_tokens:
            self._taken.setdefault(request.request_id, []).append(position)
        self.plans.done(request, position)

    def _cache(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        block: KVCacheBlock,
        start: int,
        position: int,
    ) -> None:
        if self._pool.events is not None:
            self._pool.events.request = request
        if manager.cache_tail(request, block, position) and manager.is_recurrent:
            block.credit = self._policy.credit(
                position, start, request.num_prompt_tokens, self._state_bytes
            )

    def leave(self, request: Request) -> None:
        """The request is about to give its blocks back: its running state becomes a checkpoint if
        all tokens it covers are known. Drafts in flight are none of them: the workers leave them
        out of the state, but for those of a step before the last."""
        request_id, drafts = request.request_id, request.num_drafts_in_flight
        computed, request.num_state_tokens = request.num_state_tokens, 0
        position = computed - drafts
        start = self._starts.pop(request_id, 0)
        self.plans.drop(request_id)
        self._taken.pop(request_id, None)
        if drafts and request.discard_outputs:
            # These are of steps before it lost its blocks.
            return
        if computed == request.num_computed_tokens and 0 < position <= request.num_tokens:
            if drafts:
                self._kept[request_id] = position
            for manager in self._managers:
                block = manager.block_at(request_id, position)
                if block is not None:
                    self._cache(manager, request, block, start, position)

    def blocks_left_by(self, request: Request) -> list[KVCacheBlock]:
        """The checkpoints a running request has left, and still has in the cache."""
        found = []
        for position in self._taken.get(request.request_id, ()):
            for manager in self._managers:
                if manager.is_recurrent:
                    key = request.prefix_hash(position)
                    block = self._pool.get_cached_block(key, manager.group_id)
                    if block is not None:
                        found.append(block)
        return found

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """What the request computed after its first `num_tokens` tokens is wrong; it computes
        them again."""
        request.num_state_tokens = 0
        if request.request_id in self._starts:
            start = min(self._starts[request.request_id], num_tokens)
            self._starts[request.request_id] = start
        self._saved = [
            s for s in self._saved if s.request is not request or s.position <= num_tokens
        ]
        for position in self._taken.pop(request.request_id, ()):
            if position <= num_tokens:
                continue
            for manager in self._managers:
                key = manager.keys(request).prefix_hash(position)
                block = self._pool.get_cached_block(key, manager.group_id)
                if block is not None:
                    self._pool.uncache_block(block)


class CheckpointPlans:
    """The positions at which running requests still have to leave a checkpoint.

    A request whose prompt starts with one of these prefixes should wait for the checkpoint rather
    than compute the same tokens beside it: `awaited` finds them.
    """

    def __init__(self, policy: CheckpointPolicy) -> None:
        self.policy = policy
        #: request id -> positions, the next one last
        self._positions: dict[str, list[int]] = {}
        #: parent hash -> prefix hash -> (position, requests that will leave this checkpoint)
        self._coming: dict[BlockHash, dict[BlockHash, tuple[int, set[str]]]] = {}
        self._announced: dict[str, Request] = {}

    def make(self, request: Request, start: int, diverged: int) -> None:
        """Plan for a request about to compute its tokens after `start`; replaces an earlier plan,
        which nobody waits for any more."""
        self.drop(request.request_id)
        positions = self.policy.positions(
            start, request.num_prompt_tokens, request.cache.checkpoints, diverged
        )
        self._positions[request.request_id] = positions[::-1]

    def announce(self, request: Request) -> None:
        """The request runs: others may wait for its checkpoints."""
        for position in self._positions.get(request.request_id, ()):
            parent, prefix = request.prefix_parent(position), request.prefix_hash(position)
            following = self._coming.setdefault(parent, {})
            following.setdefault(prefix, (position, set()))[1].add(request.request_id)
        self._announced[request.request_id] = request

    def next_position(self, request_id: str, num_computed_tokens: int) -> int | None:
        """The first position after `num_computed_tokens`, where a chunk must end."""
        positions = self._positions.get(request_id)
        if not positions:
            return None
        for position in reversed(positions):
            if position > num_computed_tokens:
                return position
        return None

    def is_due(self, request_id: str, num_tokens: int) -> bool:
        """Whether a chunk that ends at `num_tokens` leaves a checkpoint."""
        return self.next_position(request_id, num_tokens - 1) == num_tokens

    def awaited(self, request: Request, num_cached_tokens: int) -> int:
        """The longest prefix of the request, beyond what is cached, that another request is about
        to leave a checkpoint of; 0 if there is none."""
        if not self._coming:
            return 0
        last = request.num_tokens - 1
        block_size = request.hash_block_size
        for num_blocks in range(last // block_size, num_cached_tokens // block_size - 1, -1):
            parent = request.prefix_parent(num_blocks * block_size)
            positions = {position for position, _ in self._coming.get(parent, {}).values()}
            for position in sorted(positions, reverse=True):
                if not num_cached_tokens < position <= last:
                    continue
                found = self._coming[parent].get(request.prefix_hash(position))
                if found is not None and found[1] - {request.request_id}:
                    return position
        return 0

    def done(self, request: Request, position: int) -> None:
        """The checkpoint exists, or will not: nobody waits for it any more."""
        positions = self._positions.get(request.request_id)
        if positions is not None and position in positions:
            positions.remove(position)
        self._withdraw(request, position)

    def drop(self, request_id: str) -> None:
        """The request leaves no more checkpoints."""
        positions = self._positions.pop(request_id, ())
        request = self._announced.pop(request_id, None)
        if request is not None:
            for position in positions:
                self._withdraw(request, position)

    def _withdraw(self, request: Request, position: int) -> None:
        parent, prefix = request.prefix_parent(position), request.prefix_hash(position)
        following = self._coming.get(parent, {})
        if prefix not in following:
            return
        requests = following[prefix][1]
        requests.discard(request.request_id)
        if not requests:
            del following[prefix]
            if not following:
                del self._coming[parent]
