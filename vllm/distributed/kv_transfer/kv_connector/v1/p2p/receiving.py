# SPDX-License-Identifier: Apache-2.0
"""A consumer's worker: fetches state, and lets it into the arena when it is what was sealed."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import (
    BlockCopies,
    parts,
    segment_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import (
    WEIGHTS,
    HandshakeRefused,
    Identity,
    compare,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.lanes import Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import (
    MAX_WAIT_S,
    P2pStats,
    ReceiveJob,
    RemoteState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.peers import Peer, Peers
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import NoRoom, Staging
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import (
    Range,
    StillWriting,
    Transport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Address,
    Deadline,
    Message,
    PeerLost,
    PeerRefused,
    ask,
)
from vllm.distributed.kv_transfer.kv_connector.v1.seal import SealBroken, compare_digests
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import ArenaPlan

logger = init_logger(__name__)

#: requests of one peer that are fetched at a time
_PER_PEER = 4
#: leases are extended this often before they end
_BEATS_PER_LEASE = 6
#: whatever a peer says of its leases
_MIN_BEAT_S = 0.05
#: longest wait for an answer that nobody needs
_WORD_TIMEOUT_S = 1.0
#: longest answer to messages that are answered with a word
_MAX_WORD_BYTES = 64 * 2**10
#: a peer's request may have staging memory for `timeout_s`; those of others wait longer for it
_ROOM_TIMEOUTS = 2


class Receiver:
    """`rank` of a consumer talks to the producer's worker of the same rank. `ended` is called when
    there is something for `take_received`, by the thread that brought it."""

    def __init__(
        self,
        copies: BlockCopies,
        staging: Staging,
        transport: Transport,
        identity: Identity,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        ended: Callable[[], None],
    ) -> None:
        self._copies, self._staging, self._transport = copies, staging, transport
        self._rank, self._timeout_s, self._ended = rank, timeout_s, ended
        self._peers = Peers(transport, identity, rank, num_ranks)
        self._lock = threading.Lock()
        self._received: dict[str, bool] = {}
        self._stats = P2pStats()
        self._changed = threading.Condition()
        self._expected: set[RemoteState] = set()
        self._extending: set[Address] = set()
        self._beat_s = 1.0
        self._closed = False
        self._fetches = Lanes("kv-p2p-receive", _PER_PEER)
        self._words = Lanes("kv-p2p-words", 1)
        self._sealer = staging.make_sealer("kv-p2p-check")
        self._beats = threading.Thread(target=self._beat, name="kv-p2p-beats", daemon=True)
        self._beats.start()

    # ---- from the steps ------------------------------------------------------------------------

    def expect(self, remote: RemoteState) -> None:
        """Extend the lease until the state was fetched or given up."""
        with self._changed:
            self._expected.add(remote)
            self._changed.notify_all()

    def give_up(self, remote: RemoteState) -> None:
        """The state will not be fetched."""
        self._finish(remote)

    def receive(self, job: ReceiveJob) -> None:
        """Fill blocks that nothing launched from here on touches before the report."""
        after = self._copies.mark()
        self._fetches.submit(_lane(job.remote), partial(self._receive, job, after))

    def reset(self, weights: list[Any]) -> None:
        """From here on the engine's weights are these."""
        self._peers.identity = {**self._peers.identity, WEIGHTS: weights}

    def take_received(self) -> dict[str, bool]:
        """Request id -> whether its state has come, of the jobs that ended."""
        with self._lock:
            received, self._received = self._received, {}
        return received

    def take_stats(self) -> P2pStats:
        with self._lock:
            stats, self._stats = self._stats, P2pStats()
        return stats

    # ---- one request ---------------------------------------------------------------------------

    def _receive(self, job: ReceiveJob, after: torch.cuda.Event | None, since: float) -> None:
        began = time.perf_counter()
        arrived = False
        try:
            num_bytes = self._fetch(job, after, Deadline(self._timeout_s, since))
            seconds = time.perf_counter() - began
            arrived = True
            self._fetches.note_progress(_lane(job.remote))
            counts = {"received_requests": 1, "received_bytes": num_bytes}
            with self._lock:
                self._stats.add(**counts, receive_seconds=seconds)
        except (PeerLost, PeerRefused, HandshakeRefused, SealBroken, StillWriting, NoRoom) as error:
            # As text: who keeps the log's records would keep the trace, and what it passed through.
            text = str(error)
            logger.error("request %s: its state cannot be fetched: %s", job.req_id, text)
            if isinstance(error, SealBroken):
                with self._lock:
                    self._stats.add(broken_seals=1)
        except (KeyError, IndexError, TypeError, ValueError, msgspec.MsgspecError) as error:
            logger.error(
                "request %s: its state cannot be fetched: %s answers what no engine does: %s",
                job.req_id,
                job.remote.host,
                repr(error),
            )
        except Exception:
            logger.exception("request %s: its state cannot be fetched", job.req_id)
        finally:
            with self._lock:
                self._received[job.req_id] = arrived
                if not arrived:
                    self._stats.add(failed_receives=1)
            self._ended()
            self._finish(job.remote)

    def _fetch(self, job: ReceiveJob, after: torch.cuda.Event | None, deadline: Deadline) -> int:
        """Bytes that came."""
        with self._peers.using(job.remote, deadline) as peer:
            self._beat_for(peer)
            question = {
                "op": "describe",
                "engine_id": job.remote.engine_id,
                "req_id": job.remote.req_id,
                "wait_s": min(deadline.left(peer.label), MAX_WAIT_S),
            }
            asked = time.perf_counter()
            described = ask(self._peers.address(job.remote), question, deadline)
            waited = time.perf_counter() - asked
            mine = {WEIGHTS: self._peers.identity.get(WEIGHTS)}
            compare(mine, {WEIGHTS: described[WEIGHTS]}, peer.label)
            sources = _sources(job, described, self._copies.plan)
            size = segment_bytes(self._copies.plan, job.places)
            offset = self._room(size, deadline)
            try:
                peer.check()
                reads = _merged(sources, described["offset"], offset)
                began = time.perf_counter()
                self._transport.read(peer.name, reads, deadline)
                spent = time.perf_counter() - began
                with self._lock:
                    self._stats.add(wait_seconds=waited, read_seconds=spent)
                self._let_in(job, sources, self._staging.buffer[offset : offset + size], after)
            except StillWriting:
                raise  # the segment stays taken: something may still write to it
            except BaseException:
                self._staging.free(offset)
                raise
            self._staging.free(offset)
            return size

    def _room(self, size: int, deadline: Deadline) -> int:
        """Offset of a segment of staging memory; the wait for it is not a wait for the peer."""
        began = time.monotonic()
        offset = self._staging.allocate(size, _ROOM_TIMEOUTS * self._timeout_s)
        deadline.postpone(time.monotonic() - began)
        return offset

    def _let_in(
        self,
        job: ReceiveJob,
        sources: Sequence[_Source],
        segment: Tensor,
        after: torch.cuda.Event | None,
    ) -> None:
        """Copy a segment to the arena if it is what was sealed."""
        began = time.perf_counter()
        found = self._sealer.digests(segment, [(s.local, s.size) for s in sources])
        with self._lock:
            self._stats.add(seal_bytes=len(segment), seal_seconds=time.perf_counter() - began)
        for source, one in zip(sources, found, strict=True):
            what = f"state group {source.group}, block {source.nth} of {job.remote.req_id}"
            compare_digests(one, source.sealed, what)
        self._copies.to_arena(job.places, segment, after)

    # ---- words that nobody waits for -----------------------------------------------------------

    def _finish(self, remote: RemoteState) -> None:
        """Tell the producer that its copy is not needed; its lease ends by itself if it is not
        there to hear that."""
        with self._changed:
            self._expected.discard(remote)
        if self._rank < len(remote.ports):
            address = self._peers.address(remote)
            message = {"op": "done", "req_id": remote.req_id}
            self._words.submit(address, partial(self._tell, address, message))

    def _tell(self, address: Address, message: Message, since: float) -> None:
        deadline = Deadline(min(self._timeout_s, _WORD_TIMEOUT_S))
        try:
            ask(address, message, deadline, _MAX_WORD_BYTES)
        except (PeerLost, PeerRefused) as error:
            logger.debug("a peer did not hear %s: %s", message, error)

    def _extend(self, address: Address, message: Message, since: float) -> None:
        try:
            self._tell(address, message, since)
        finally:
            with self._changed:
                self._extending.discard(address)

    def _beat_for(self, peer: Peer) -> None:
        """Extend leases as often as this peer's need it."""
        with self._changed:
            self._beat_s = max(_MIN_BEAT_S, min(self._beat_s, peer.lease_s / _BEATS_PER_LEASE))

    def _beat(self) -> None:
        """Thread: extend the leases of what is expected."""
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(self._beat_s if self._expected else None)
                if self._closed:
                    return
                waiting: dict[Address, list[str]] = defaultdict(list)
                for remote in self._expected:
                    if self._rank < len(remote.ports):
                        waiting[self._peers.address(remote)].append(remote.req_id)
                for address in self._extending & waiting.keys():
                    del waiting[address]  # it has not answered yet
                self._extending.update(waiting)
            for address, req_ids in waiting.items():
                message = {"op": "extend", "req_ids": req_ids}
                self._words.submit(address, partial(self._extend, address, message))

    def close(self) -> None:
        """Give up what has not arrived; returns at the deadline of those at the latest."""
        self._staging.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._fetches.close()
        self._words.close()
        self._sealer.close()
        self._beats.join()


def _lane(remote: RemoteState) -> Hashable:
    """Whose requests wait for one another."""
    return remote.host, remote.ports


class _Source(NamedTuple):
    """A wanted block: bytes from the start of the peer's segment and of one's own, bytes, seal."""

    group: int
    nth: int
    remote: int
    local: int
    size: int
    sealed: int


def _sources(job: ReceiveJob, described: Message, plan: ArenaPlan) -> list[_Source]:
    """Where the wanted blocks are; `PeerRefused` if this is state of something else."""
    for key, mine in (
        ("num_tokens", job.remote.num_tokens),
        ("tokens_digest", job.tokens_digest),
    ):
        if described[key] != mine:
            raise PeerRefused(
                f"the state of {job.remote.req_id} is of other tokens than this prompt: {key} is "
                f"{described[key]} there and {mine} here"
            )
    found: dict[tuple[int, int], tuple[int, int]] = {}
    start = 0
    for group, seals in enumerate(described["blocks"]):
        for index, sealed in seals:
            found[group, index] = start, sealed
            start += plan.groups[group].block_bytes
    indices = [place.nth for own in job.places for place in own]
    sources = []
    for index, (group, _, local, size) in zip(indices, parts(plan, job.places), strict=True):
        if (group, index) not in found:
            raise PeerRefused(
                f"the state of {job.remote.req_id} lacks block {index} of state group {group}"
            )
        remote, sealed = found[group, index]
        sources.append(_Source(group, index, remote, local, size, sealed))
    return sources


def _merged(sources: Sequence[_Source], remote_base: int, local_base: int) -> list[Range]:
    """Few long ranges: blocks lie side by side on both sides."""
    merged: list[Range] = []
    for source in sources:
        remote = remote_base + source.remote
        last = merged[-1] if merged else None
        if last is not None and remote == last.remote + last.size:
            merged[-1] = last._replace(size=last.size + source.size)
        else:
            merged.append(Range(remote, local_base + source.local, source.size))
    return merged
