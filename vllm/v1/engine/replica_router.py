# SPDX-License-Identifier: Apache-2.0
"""Between a front end and its replicas: requests to where they are chosen to run, and news of them
back to the one that chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.parallel_sampling import child_requests
from vllm.v1.engine.replica_board import BoardShare, ReplicaBoard
from vllm.v1.engine.replica_choice import REASONS, ReplicaChooser, Work

T = TypeVar("T")

_TOKEN_BYTES = 4
#: blocks of a prompt that are looked at: prompts that agree so far seldom differ in the next ones
_MOST_BLOCKS = 2048
_KEY_BYTES = 8
_MASK = (1 << 64) - 1


class ReplicaRouter:
    """Replicas are numbered from 0 here; `first_rank` is the rank of the first."""

    def __init__(self, chooser: ReplicaChooser, chains: PromptChains, first_rank: int) -> None:
        self._chooser = chooser
        self._chains = chains
        self._first_rank = first_rank
        #: requests by (replica, reason)
        self.choices: Counter[tuple[int, str]] = Counter()

    def place(self, requests: list[EngineCoreRequest]) -> dict[int, list[EngineCoreRequest]]:
        """Choose a replica for each, and tell them apart; in their order."""
        placed: dict[int, list[EngineCoreRequest]] = {}
        for request in requests:
            params = request.sampling_params
            assert params.max_tokens is not None
            work = Work(
                self._chains.of(request),
                len(request.prompt_token_ids),
                params.max_tokens,
                params.n,
            )
            pinned = request.data_parallel_rank
            choice = self._chooser.choose(
                work, None if pinned is None else pinned - self._first_rank
            )
            ids = [child.request_id for child in child_requests(request)]
            self._chooser.start(choice, work, ids)
            self.choices[choice.replica, choice.reason] += 1
            placed.setdefault(choice.replica, []).append(request)
        return placed

    def by_replica(self, items: Iterable[T], request_id: Callable[[T], str]) -> dict[int, list[T]]:
        """Messages about requests, by where those run; requests that have ended need none."""
        groups: dict[int, list[T]] = {}
        for item in items:
            replica = self._chooser.replica_of(request_id(item))
            if replica is not None:
                groups.setdefault(replica, []).append(item)
        return groups

    def rank_of(self, request_id: str) -> int | None:
        """Where a request runs; None for one that has ended."""
        replica = self._chooser.replica_of(request_id)
        return None if replica is None else self._first_rank + replica

    def end(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these."""
        for request_id in request_ids:
            self._chooser.ended(request_id)

    def observe(self, outputs: EngineCoreOutputs) -> None:
        """Take note of a message: who began, who ended, how much was generated."""
        num_tokens = 0
        for output in outputs.outputs:
            num_tokens += len(output.new_token_ids)
            if output.times is not None:
                self._chooser.began(output.request_id)
            if output.finish_reason is not None and not output.awaits_stop:
                self._chooser.ended(output.request_id)
        if outputs.plain is not None:
            num_tokens += len(outputs.plain.token_ids) // _TOKEN_BYTES
        self._chooser.generated(outputs.engine_index - self._first_rank, num_tokens)

    def lose(self, place: int) -> None:
        """Another front end is gone, and with it what it waited for."""
        self._chooser.board.clear(place)

    def forget_prefixes(self) -> None:
        """The replicas' caches are empty."""
        self._chooser.board.forget()

    def use_capacities(self, capacities: Iterable[int | None]) -> None:
        """The replicas hold so many tokens each from now on, as far as that can be said."""
        self._chooser.use_capacities([one or self._chains.block_size for one in capacities])

    @property
    def waiting(self) -> dict[int, int]:
        """Tokens that wait at each rank."""
        return {self._first_rank + i: tokens for i, tokens in enumerate(self._chooser.loads)}

    def collector(self, model_name: str) -> Collector:
        """The choices so far and what waits, as metrics."""
        return _Choices(self, model_name, self._first_rank)


def make_router(
    vllm_config: VllmConfig, configs: Sequence[VllmConfig], share: BoardShare | None
) -> ReplicaRouter:
    """For the replicas with these configurations, which have started; `share`: with other front
    ends."""
    block_size = vllm_config.cache_config.block_size
    share = share or BoardShare()
    # Capacities may change, with the placement, and the board does not.
    board = ReplicaBoard(len(configs), num_places=share.num_places, path=share.path)
    chains = PromptChains(block_size, vllm_config.cache_config.enable_prefix_caching)
    parallel = vllm_config.parallel_config
    vllm_config.decisions.record(
        "replicas",
        len(configs),
        f"--data-parallel-size {parallel.data_parallel_size}; a request goes where least is to be "
        "computed before its first token, the part of its prompt that a replica has left out",
    )
    capacities = [config.cache_config.capacity_tokens or block_size for config in configs]
    chooser = ReplicaChooser(board, capacities, block_size, share.place)
    return ReplicaRouter(chooser, chains, parallel.local_ranks[0])


class _Choices(Collector):
    def __init__(self, router: ReplicaRouter, model_name: str, first_rank: int) -> None:
        self._router, self._model_name, self._first_rank = router, model_name, first_rank

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Of the router as it is now."""
        waiting = self._router.waiting
        labels = ["model_name", "engine"]
        gauge = GaugeMetricFamily(
            "vllm:replica_waiting_tokens",
            "Tokens that wait to be computed at a replica, as the choice of replicas counts them.",
            labels=labels,
        )
        counter = CounterMetricFamily(
            "vllm:replica_requests",
            "Requests sent to a replica: pinned by the client, for a cached prefix, for its load.",
            labels=[*labels, "reason"],
        )
        for rank, tokens in waiting.items():
            values = [self._model_name, str(rank)]
            gauge.add_metric(values, tokens)
            for reason in REASONS:
                count = self._router.choices[rank - self._first_rank, reason]
                counter.add_metric([*values, reason], count)
        yield gauge
        yield counter


@dataclass
class _Prompt:
    """What `BlockHasher` reads of a request."""

    all_token_ids: list[int]
    cache_salt: str | None
    lora_request: Any | None = None
    mm_features: list[Any] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)


class PromptChains:
    """Chained as the prefix cache chains its hashes, of the same blocks with the same extra keys,
    and the placement that a request asks for, whose groups have a cache of their own there; but 64
    bits wide and quick to make: a collision costs a replica's hit and nothing else. The same in all
    processes."""

    def __init__(self, block_size: int, is_cached: bool = True) -> None:
        self.block_size = block_size
        self._is_cached = is_cached
        self._hasher = get_request_block_hasher(block_size, _fingerprint, BlockHash(b"\x01"))

    def of(self, request: EngineCoreRequest) -> np.ndarray:
        """Keys of the prompt's full blocks, uint64 `[blocks]`; none without a prefix cache."""
        if not self._is_cached:
            return np.zeros(0, np.uint64)
        tokens = request.prompt_token_ids[: _MOST_BLOCKS * self.block_size]
        salt, placement = request.cache_salt, request.sampling_params.placement
        if placement is not None:  # what another one has computed is not found
            salt = repr((salt, placement))
        prompt = _Prompt(tokens, salt)
        return np.frombuffer(b"".join(self._hasher(prompt)), np.uint64)


def _fingerprint(value: Any) -> bytes:
    """Of `(parent, tokens, extra keys)`. Python's hash of integers, unlike that of text, is the
    same in all processes; 0 is left out."""
    parent, tokens, extra = value
    numbers = (int.from_bytes(parent, "little"), *tokens)
    if extra is not None:
        numbers = (*numbers, int.from_bytes(sha256(extra)[:_KEY_BYTES], "little"))
    return ((hash(numbers) & _MASK) or 1).to_bytes(_KEY_BYTES, "little")
