# SPDX-License-Identifier: Apache-2.0
"""Where recurrent state is worth a checkpoint, and how long a checkpoint is worth its bytes.

One object holds both choices; `benchmarks/prefix_cache_simulation.py` compares it with others, and
docs/state_memory.md says what came out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointPolicy:
    """`block_size`: tokens of the paged groups' smallest block; `block_bytes`: bytes of so many
    tokens in all paged groups together; `interval`: additional checkpoints every so many prompt
    tokens; `chunk_size`: tokens the prefill kernels of recurrent layers take at a time;
    `num_ahead`: tokens after a prefix that some group's rows depend on."""

    block_size: int
    block_bytes: int
    interval: int | None = None
    chunk_size: int = 64
    num_ahead: int = 0

    def positions(
        self, start: int, num_prompt_tokens: int, marks: Iterable[int], diverged: int
    ) -> list[int]:
        """Token counts after `start` at which a prompt leaves a checkpoint, ascending.

        Its end (one token short: the last one must be computed to have logits), the client's
        `marks` (`num_ahead` tokens short: whoever shares no more than the marked prefix must be
        able to continue every group), every `interval` tokens, and `diverged`: the tokens of a
        cached prefix that the paged groups could have continued but no recurrent state could. That
        one moves to the chunk boundary before it, where continuing gives the bits of computing
        everything, unless that is 0. The latter two are left out within a block before another,
        which serves the same requests.
        """
        last = num_prompt_tokens - 1
        if last <= start:
            return []
        marked = (mark - self.num_ahead for mark in marks)
        firm = {mark for mark in (*marked, last) if start < mark <= last}
        aligned = diverged - diverged % self.chunk_size
        soft = {aligned or diverged}
        if self.interval is not None:
            soft.update(range(self.interval, last, self.interval))
        kept = sorted(firm)
        for position in soft:
            if not start < position < last:
                continue
            following = kept[bisect_left(kept, position)]
            if following >= position + self.block_size:
                firm.add(position)
        return sorted(firm)

    def credit(self, position: int, start: int, num_prompt_tokens: int, num_bytes: int) -> float:
        """Worth of a checkpoint of `num_bytes` at `position`, left by a request that started at
        `start`, in units of a full block of every paged group: tokens it saves per byte, over the
        same for a block. The end of a prompt is worth nothing once memory is short: the end of the
        answer continues whatever follows but the same prompt again.
        """
        if position == num_prompt_tokens - 1:
            return 0.0
        num_tokens = position - start
        if not self.block_bytes:
            return float(num_tokens)
        return (num_tokens / num_bytes) / (self.block_size / self.block_bytes)
