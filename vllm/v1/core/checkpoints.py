# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of recurrent state: where each request will leave one, and who waits for it."""

from __future__ import annotations

from vllm.v1.core.checkpoint_policy import CheckpointPolicy
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


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
