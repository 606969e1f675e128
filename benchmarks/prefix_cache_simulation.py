# SPDX-License-Identifier: Apache-2.0
"""Which states a prefix cache for recurrent layers should keep: policies on one agent trace.

    python -m benchmarks.prefix_cache_simulation [--memory-gb 20,40,80,160] [--seed 0] ...

Replays `agent_trace.py` against caches of Qwen3.5-4B's state and prints the part of prompt tokens
found, and the bytes of checkpoints held. Writes docs/measurements/prefix_cache.json, a picture
beside it, and the table in docs/state_memory.md (`--no-write` only prints).

Requests run one after the other and the memory is the cache's alone, so that nothing but the
choice of what to keep differs; `prefix_cache_policies.py` has the choices.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.agent_trace import (
    TraceConfig,
    TraceRequest,
    add_flags,
    config_of,
    make_trace,
    summary,
)
from benchmarks.prefix_cache_policies import Policy, policies
from benchmarks.report import prefix_cache_rows, rendered

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "measurements" / "prefix_cache.json"
GUIDE = ROOT / "docs" / "state_memory.md"


# ---- the cache ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """A block or a state that can be found under `key`. `place`: a state's parent and remainder."""

    key: int
    num_bytes: int
    place: tuple[int, int] | None = None
    credit: float = 1.0
    rank: tuple[float, int] = (0.0, 0)


class Cache:
    """Blocks and states by content, evicted by rank as the engine's pool does.

    An entry's rank is the credit it has when last used on top of the highest rank evicted so far;
    with equal credits this is LRU. `capacity`: bytes of everything, `state_capacity` of states.
    """

    def __init__(self, capacity: float, state_capacity: float = math.inf) -> None:
        self._capacity = {False: capacity, True: state_capacity}
        self._evicts = {
            False: not math.isinf(capacity),
            True: not math.isinf(min(capacity, state_capacity)),
        }
        self.entries: dict[int, Entry] = {}
        #: parent -> lengths of what follows it at which there is a state
        self.remainders: dict[int, set[int]] = {}
        self.used = 0
        self.state_used = 0
        self._heaps: dict[bool, list[tuple[tuple[float, int], Entry]]] = {False: [], True: []}
        self._clock = count(1)
        self._floor = 0.0

    def put(self, entry: Entry) -> None:
        """Keep an entry, or mark the one that has its key as used."""
        known = self.entries.setdefault(entry.key, entry)
        if known is entry:
            self.used += entry.num_bytes
            if entry.place is not None:
                self.state_used += entry.num_bytes
                self.remainders.setdefault(entry.place[0], set()).add(entry.place[1])
        self.use(known.key)

    def use(self, key: int) -> None:
        entry = self.entries[key]
        is_state = entry.place is not None
        if self._evicts[is_state]:
            entry.rank = (self._floor + entry.credit, next(self._clock))
            heapq.heappush(self._heaps[is_state], (entry.rank, entry))

    def shrink(self) -> None:
        """Evict until everything fits."""
        while self.state_used > self._capacity[True]:
            self._evict(self._first(True))
        while self.used > self._capacity[False]:
            firsts = [entry for entry in (self._first(False), self._first(True)) if entry]
            self._evict(min(firsts, key=lambda entry: entry.rank))

    def _first(self, states: bool) -> Entry | None:
        """The entry of a kind with the lowest rank."""
        heap = self._heaps[states]
        while heap:
            rank, entry = heap[0]
            if entry.rank == rank and self.entries.get(entry.key) is entry:
                return entry
            heapq.heappop(heap)
        return None

    def _evict(self, entry: Entry | None) -> None:
        assert entry is not None
        self._floor = max(self._floor, entry.rank[0])
        del self.entries[entry.key]
        self.used -= entry.num_bytes
        if entry.place is not None:
            self.state_used -= entry.num_bytes
            parent, remainder = entry.place
            self.remainders[parent].discard(remainder)


# ---- one request -------------------------------------------------------------------------------


class Prefixes:
    """Names of the prefixes of one request's tokens, in blocks of `unit`."""

    def __init__(self, request: TraceRequest, unit: int) -> None:
        self.request = request
        self.unit = unit
        self._tokens = request.tokens
        #: hashes[i]: name of the first `i` blocks
        self.hashes = [0]
        for start in range(0, request.num_computed // unit * unit, unit):
            block = self._tokens[start : start + unit].tobytes()
            self.hashes.append(hash((self.hashes[-1], block)))

    def place(self, position: int) -> tuple[int, int]:
        """`(parent, remainder)` of a prefix."""
        blocks, remainder = divmod(position, self.unit)
        return self.hashes[blocks], remainder

    def block(self, index: int) -> int:
        """Key of a full block."""
        return self.hashes[index + 1]

    def end(self, position: int) -> int:
        """Key of the partly filled block that ends a prefix."""
        return hash(("end", self._exact(position)))

    def state(self, position: int) -> int:
        return hash(("state", self._exact(position)))

    def _exact(self, position: int) -> int:
        parent, remainder = self.place(position)
        return hash((parent, self._tokens[position - remainder : position].tobytes()))


@dataclass
class Result:
    """Of one policy in one cache. Bytes of checkpoints: at most, and on average over requests."""

    policy: str
    memory_bytes: float | None
    checkpoint_limit_bytes: float | None = None
    prompt_tokens: int = 0
    hit_tokens: int = 0
    checkpoints: int = 0
    peak_checkpoint_bytes: int = 0
    mean_checkpoint_bytes: float = 0.0
    by_kind: dict[str, list[int]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class Simulation:
    """Replays a trace against one policy's cache."""

    def __init__(self, policy: Policy, cache: Cache) -> None:
        self.policy = policy
        self.sizes = policy.sizes
        self.cache = cache

    def run(self, trace: Sequence[Prefixes], result: Result) -> Result:
        """`trace`: in blocks of the policy's unit."""
        for names in trace:
            hit, states = self._serve(names)
            request = names.request
            result.prompt_tokens += request.num_prompt
            result.hit_tokens += hit
            result.checkpoints += states
            kind = result.by_kind.setdefault(request.kind, [0, 0])
            kind[0] += hit
            kind[1] += request.num_prompt
            held = self.cache.state_used
            result.peak_checkpoint_bytes = max(result.peak_checkpoint_bytes, held)
            result.mean_checkpoint_bytes += held / len(trace)
        return result

    def _serve(self, names: Prefixes) -> tuple[int, int]:
        """Tokens found and states left."""
        request = names.request
        paged, hit = self._look_up(request, names)
        positions = self.policy.prompt_positions(request, hit, paged)
        positions += [p for p in self.policy.answer_positions(request) if p > hit]
        if hit:
            self.cache.use(names.state(hit))
        for position in positions:
            credit = self.policy.credit(request, position, hit)
            self._keep(names, position, credit)
        # As in the engine, what ends a sequence is let go of first and so evicted first.
        for key in reversed(names.hashes[1:]):
            if key in self.cache.entries:
                self.cache.use(key)
            else:
                self.cache.put(Entry(key, self.sizes.block_bytes))
        self.cache.shrink()
        return hit, len(positions)

    def _keep(self, names: Prefixes, position: int, credit: float) -> None:
        parent, remainder = names.place(position)
        state = Entry(names.state(position), self.sizes.state_bytes, (parent, remainder), credit)
        if remainder:
            self.cache.put(Entry(names.end(position), self.sizes.block_bytes))
        self.cache.put(state)

    def _look_up(self, request: TraceRequest, names: Prefixes) -> tuple[int, int]:
        """Tokens whose blocks are there, and the longest prefix with a state as well."""
        entries, unit = self.cache.entries, self.sizes.unit
        limit = request.num_prompt - 1
        full = 0
        while (full + 1) * unit <= limit and names.block(full) in entries:
            full += 1
        for blocks in range(full, -1, -1):
            remainders = self.cache.remainders.get(names.hashes[blocks], ())
            for remainder in sorted(remainders, reverse=True):
                position = blocks * unit + remainder
                if 0 < position <= limit and self._continues(names, position, full):
                    return max(full * unit, position), position
        return full * unit, 0

    def _continues(self, names: Prefixes, position: int, full: int) -> bool:
        """Whether state and blocks are there for exactly `position` tokens."""
        entries = self.cache.entries
        if names.state(position) not in entries:
            return False
        blocks, remainder = divmod(position, self.sizes.unit)
        return not remainder or blocks < full or names.end(position) in entries


def compare(trace: Sequence[TraceRequest], memory_gb: Sequence[float]) -> list[Result]:
    """Every policy at every size of the cache, without a limit, and ours at a tenth of the
    checkpoint bytes that the better of the others then holds."""
    known = policies()
    units = {policy.sizes.unit for policy in known}
    named = {unit: [Prefixes(request, unit) for request in trace] for unit in units}
    results = []
    for policy in known:
        for size in (*memory_gb, math.inf):
            memory = size * 1e9
            result = Result(policy.name, None if math.isinf(memory) else memory)
            results.append(Simulation(policy, Cache(memory)).run(named[policy.sizes.unit], result))
    unlimited = [r for r in results if r.memory_bytes is None and not r.policy.startswith("exact")]
    best = max(unlimited, key=lambda r: r.hit_rate)
    limit = best.peak_checkpoint_bytes / 10
    for policy in known:
        if policy.name.startswith("exact"):
            result, names = Result(policy.name, None, limit), named[policy.sizes.unit]
            results.append(Simulation(policy, Cache(math.inf, limit)).run(names, result))
    return results


def as_json(config: TraceConfig, trace: Sequence[TraceRequest], results: Sequence[Result]) -> Any:
    """What docs/measurements holds."""
    return {
        "trace": {**dataclasses.asdict(config), **summary(trace)},
        "results": [
            {**dataclasses.asdict(result), "hit_rate": result.hit_rate} for result in results
        ],
    }


def draw(results: Sequence[Result], file: Path) -> None:
    """Part of the prompt tokens found over the size of the cache, a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(result.policy for result in results):
        points = [
            (result.memory_bytes / 1e9, 100 * result.hit_rate)
            for result in results
            if result.policy == name and result.memory_bytes is not None
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    sizes = sorted({result.memory_bytes / 1e9 for result in results if result.memory_bytes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_xlabel("cache, GB")
    axes.set_ylabel("prompt tokens found, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--memory-gb", default="10,20,40,80", help="Sizes of the cache.")
    parser.add_argument("--no-write", action="store_true", help="Only print.")
    add_flags(parser)
    args = parser.parse_args()
    config = config_of(args)
    trace = make_trace(config)
    results = compare(trace, [float(size) for size in args.memory_gb.split(",")])
    data = as_json(config, trace, results)
    print(prefix_cache_rows(data["results"]))
    if not args.no_write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        draw(results, DATA.with_suffix(".png"))
        GUIDE.write_text(rendered(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
