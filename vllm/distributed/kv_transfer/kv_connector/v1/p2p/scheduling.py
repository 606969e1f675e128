# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: whose state is handed on, and who waits for state from elsewhere.

A producer computes all of a prompt but its last token: the consumer computes that one, to have its
logits, and continues a recurrent state only at exactly the token where it was left. Where rows of a
drafter depend on the token after their own, that last token is the producer's one output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import segment_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import (
    P2pMetadata,
    Place,
    Places,
    ReceiveJob,
    RemoteState,
    SendJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.seal import digest
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.prefix_cache import reads_prefix_cache
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def asks_to_keep(params: dict[str, Any] | None) -> bool:
    """Whether a request's `kv_transfer_params` want its state for another engine."""
    return params is not None and bool(params.get("do_remote_decode"))


def asks_to_fetch(params: dict[str, Any] | None) -> bool:
    """Whether a request's `kv_transfer_params` name state at another engine."""
    return params is not None and bool(params.get("do_remote_prefill"))


@dataclass(frozen=True)
class Home:
    """Where this engine's workers answer peers, by rank; `staging_bytes`: of one rank."""

    engine_id: str
    host: str
    ports: tuple[int, ...]
    staging_bytes: int


class P2pScheduler:
    """`home`: None for an engine that keeps nothing for others."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.home: Home | None = None
        self._plan = config.plan
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._block_sizes = [spec.block_size for spec in specs]
        self._recurrent = [spec.is_recurrent for spec in specs]
        #: tokens after those that are handed on which some rows depend on, 0 or 1
        self._num_ahead = max(spec.num_lookahead_tokens for spec in specs)
        self._kept: set[str] = set()
        self._remote: dict[str, RemoteState] = {}
        self._metadata = P2pMetadata()

    # ---- requests come -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request joined the queue."""
        params = request.kv_transfer_params
        if asks_to_fetch(params):
            assert params is not None
            remote = RemoteState.of(params)
            self._remote[request.request_id] = remote
            self._metadata.expects.append(remote)
        elif asks_to_keep(params) and self._shorten(request):
            self._kept.add(request.request_id)

    def _shorten(self, request: Request) -> bool:
        """Let it end with the state before its last token; False if nothing is left then, or every
        position has to be computed here."""
        if request.num_prompt_tokens < 2 or not reads_prefix_cache(request):
            return False
        last = request.prompt_token_ids[-1]
        request.truncate_prompt(request.num_prompt_tokens - 1)
        if self._num_ahead:
            request.end_with(last)
        else:
            request.limit_output(1)
        return True

    # ---- state comes ---------------------------------------------------------------------------

    def num_matched(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens past `num_computed_tokens` that a peer keeps."""
        remote = self._remote.get(request.request_id)
        if remote is None:
            return 0
        # Of another prompt: the worker finds out, and the load fails.
        end = min(remote.num_tokens, request.num_tokens - 1)
        if end <= num_computed_tokens or not reads_prefix_cache(request):
            self._give_up(request.request_id)
            return 0
        return end - num_computed_tokens

    def begin_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has blocks: bring `num_external_tokens` there, if any."""
        if not num_external_tokens:
            return
        remote = self._remote.pop(request.request_id)
        end = min(remote.num_tokens, request.num_tokens - 1)
        places = self._places(blocks.get_block_ids(), end - num_external_tokens, end)
        told = _tokens_digest(request, end + self._num_ahead)
        job = ReceiveJob(request.request_id, remote, told, places)
        self._metadata.receives.append(job)

    def _give_up(self, request_id: str) -> None:
        remote = self._remote.pop(request_id, None)
        if remote is not None:
            self._metadata.releases.append(remote)

    # ---- state goes ----------------------------------------------------------------------------

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`KVConnectorBase_V1.request_finished`."""
        request_id = request.request_id
        self._give_up(request_id)
        num_tokens = request.num_computed_tokens
        if request_id not in self._kept:
            return False, None
        self._kept.remove(request_id)
        if request.status not in _COMPLETE or not num_tokens:
            return False, None
        home = self.home
        assert home is not None, "a producer was told its workers' ports"
        places = self._places(block_ids, 0, num_tokens)
        if (size := segment_bytes(self._plan, places)) > home.staging_bytes:
            logger.warning(
                "request %s is not handed on: its state takes %d bytes and staging memory has %d; "
                "raise staging_bytes",
                request_id,
                size,
                home.staging_bytes,
            )
            return False, None
        told = _tokens_digest(request, num_tokens + self._num_ahead)
        job = SendJob(request_id, num_tokens, told, places)
        self._metadata.sends.append(job)
        remote = RemoteState(home.engine_id, request_id, home.host, home.ports, num_tokens)
        return True, remote.params()

    def _places(self, block_ids: Sequence[Sequence[int]], start: int, end: int) -> Places:
        """Blocks that hold tokens `start` to `end`; a recurrent state is one block, at `end`."""
        places: Places = []
        for group, ids in enumerate(block_ids):
            size, num_null = self._block_sizes[group], self._plan.groups[group].blocks_per_page
            first, last = (0, 1) if self._recurrent[group] else (start // size, -(-end // size))
            own = [Place(i, ids[i]) for i in range(first, last) if ids[i] >= num_null]
            places.append(own)
        return places

    def reset(self, weights: list[Any]) -> None:
        """Hand on nothing of what was computed so far; from here on the weights are these."""
        self._metadata.weights = weights
        self._metadata.withdrawn += [job.req_id for job in self._metadata.sends]
        self._metadata.sends.clear()

    # ---- around a step -------------------------------------------------------------------------

    def take_metadata(self) -> P2pMetadata:
        """The step's transfers."""
        metadata, self._metadata = self._metadata, P2pMetadata()
        return metadata

    def has_work(self) -> bool:
        """Whether something waits for a step to begin in."""
        return not self._metadata.is_empty


def _tokens_digest(request: Request, num_tokens: int) -> int:
    """Of everything in a request that its first tokens' state depends on."""
    tokens = np.asarray(request.all_token_ids[:num_tokens], dtype=np.int64)
    salt = np.frombuffer((request.cache_salt or "").encode(), dtype=np.uint8)
    return digest(np.concatenate([tokens.view(np.uint8), salt]))
