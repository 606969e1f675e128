# SPDX-License-Identifier: Apache-2.0
"""A consumer's worker: fetches state, and lets it into the arena when it is what was sealed."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import (
    BlockCopies,
    parts,
    segment_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import (
    HandshakeRefused,
    Identity,
    compare,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import (
    MAX_WAIT_S,
    P2pStats,
    ReceiveJob,
    RemoteState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import Staging
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

_NUM_THREADS = 4
#: leases are extended this often before they end
_BEATS_PER_LEASE = 6
#: whatever a peer says of its leases
_MIN_BEAT_S = 0.05
#: a peer that does not answer a heartbeat must not keep the others waiting
_BEAT_TIMEOUT_S = 1.0
#: longest answer to a greeting, and to messages that are answered with a word
_MAX_HELLO_BYTES = 4 * 2**20
_MAX_WORD_BYTES = 64 * 2**10


@dataclass(frozen=True)
class _Peer:
    """A producer that keeps the same kind of state: its name at the transport, and its leases."""

    name: str
    lease_s: float


class Receiver:
    """`rank` of a consumer talks to the producer's worker of the same rank."""

    def __init__(
        self,
        copies: BlockCopies,
        staging: Staging,
        transport: Transport,
        identity: Identity,
        rank: int,
        num_ranks: int,
        timeout_s: float,
    ) -> None:
        self._copies, self._staging, self._transport = copies, staging, transport
        self._identity, self._rank, self._num_ranks = identity, rank, num_ranks
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._handshake_lock = threading.Lock()
        self._peers: dict[tuple[str, Address], _Peer] = {}
        self._received: dict[str, bool] = {}
        self._stats = P2pStats()
        self._changed = threading.Condition()
        self._expected: set[RemoteState] = set()
        self._beat_s = 1.0
        self._closed = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-p2p-receive")
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
        self._threads.submit(self._finish, remote)

    def receive(self, job: ReceiveJob) -> None:
        """Fill blocks that nothing launched from here on touches before the report."""
        self._threads.submit(self._receive, job, self._copies.mark(), Deadline(self._timeout_s))

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

    def _receive(self, job: ReceiveJob, after: torch.cuda.Event | None, deadline: Deadline) -> None:
        began = time.perf_counter()
        arrived = False
        try:
            num_bytes = self._fetch(job, after, deadline)
            seconds = time.perf_counter() - began
            arrived = True
            counts = {"received_requests": 1, "received_bytes": num_bytes}
            with self._lock:
                self._stats.add(**counts, receive_seconds=seconds)
        except (PeerLost, PeerRefused, HandshakeRefused, SealBroken, StillWriting) as error:
            logger.error("request %s: its state cannot be fetched: %s", job.req_id, error)
        except (KeyError, IndexError, TypeError, ValueError, msgspec.MsgspecError) as error:
            logger.error(
                "request %s: its state cannot be fetched: %s answers what no engine does: %r",
                job.req_id,
                job.remote.host,
                error,
            )
        except Exception:
            logger.exception("request %s: its state cannot be fetched", job.req_id)
        finally:
            with self._lock:
                self._received[job.req_id] = arrived
                if not arrived:
                    self._stats.add(failed_receives=1)
            self._finish(job.remote)

    def _fetch(self, job: ReceiveJob, after: torch.cuda.Event | None, deadline: Deadline) -> int:
        peer = self._greet(job.remote, deadline)
        question = {
            "op": "describe",
            "engine_id": job.remote.engine_id,
            "req_id": job.remote.req_id,
            "wait_s": min(deadline.left(peer.name), MAX_WAIT_S),
        }
        try:
            described = ask(self._address(job.remote), question, deadline)
            sources = _sources(job, described, self._copies.plan)
            size = segment_bytes(self._copies.plan, job.places)
            offset = self._staging.allocate(size, deadline)
        except PeerLost:
            self._part_with(job.remote)
            raise
        try:
            reads = _merged(sources, described["offset"], offset)
            self._transport.read(peer.name, reads, deadline)
            segment = self._staging.buffer[offset : offset + size]
            found = self._sealer.digests(segment, [(s.local, s.size) for s in sources])
            for source, one in zip(sources, found, strict=True):
                what = f"state group {source.group}, block {source.nth} of {job.remote.req_id}"
                compare_digests(one, source.sealed, what)
            self._copies.to_arena(job.places, segment, after)
        except StillWriting:
            self._part_with(job.remote)
            raise  # the segment stays taken: something may still write to it
        except BaseException as error:
            if isinstance(error, PeerLost):
                self._part_with(job.remote)
            self._staging.free(offset)
            raise
        self._staging.free(offset)
        return size

    def _finish(self, remote: RemoteState) -> None:
        """Tell the producer that its copy is not needed; its lease ends by itself if it is not
        there to hear that."""
        with self._changed:
            self._expected.discard(remote)
        if self._rank >= len(remote.ports):
            return
        try:
            message = {"op": "done", "req_id": remote.req_id}
            deadline = Deadline(min(self._timeout_s, _BEAT_TIMEOUT_S))
            ask(self._address(remote), message, deadline, _MAX_WORD_BYTES)
        except (PeerLost, PeerRefused) as error:
            logger.debug("%s was not told that it may forget: %s", remote.req_id, error)

    # ---- peers ---------------------------------------------------------------------------------

    def _address(self, remote: RemoteState) -> Address:
        return remote.host, remote.ports[self._rank]

    def _greet(self, remote: RemoteState, deadline: Deadline) -> _Peer:
        """The producer, after both were found to keep the same kind of state."""
        if len(remote.ports) != self._num_ranks:
            raise HandshakeRefused(
                f"{remote.host} keeps state on other ranks: tensor_parallel_size is "
                f"{self._num_ranks} here and {len(remote.ports)} there; both sides need the same"
            )
        address = self._address(remote)
        key = remote.engine_id, address
        with self._handshake_lock:
            if (known := self._peers.get(key)) is not None:
                return known
            reply = ask(address, {"op": "hello"}, deadline, _MAX_HELLO_BYTES)
            if reply["engine_id"] != remote.engine_id:
                raise PeerRefused(
                    f"{address[0]}:{address[1]} is engine {reply['engine_id']} now, not "
                    f"{remote.engine_id}"
                )
            compare(self._identity, reply["identity"], f"{address[0]}:{address[1]}")
            name = self._transport.connect(address, reply["transport"])
            peer = self._peers[key] = _Peer(name, float(reply["lease_s"]))
        with self._changed:
            self._beat_s = max(_MIN_BEAT_S, min(self._beat_s, peer.lease_s / _BEATS_PER_LEASE))
        return peer

    def _part_with(self, remote: RemoteState) -> None:
        """Whoever comes next introduces himself anew."""
        with self._handshake_lock:
            peer = self._peers.pop((remote.engine_id, self._address(remote)), None)
            if peer is not None:
                self._transport.disconnect(peer.name)

    def _beat(self) -> None:
        """Thread: extend the leases of what is expected."""
        while True:
            with self._changed:
                if not self._closed:  # while a peer was talked to nobody waited to be told
                    self._changed.wait(self._beat_s if self._expected else None)
                if self._closed:
                    return
                waiting: dict[Address, list[str]] = defaultdict(list)
                for remote in self._expected:
                    if self._rank < len(remote.ports):
                        waiting[self._address(remote)].append(remote.req_id)
            for address, req_ids in waiting.items():
                message = {"op": "extend", "req_ids": req_ids}
                try:
                    ask(address, message, Deadline(_BEAT_TIMEOUT_S), _MAX_WORD_BYTES)
                except (PeerLost, PeerRefused) as error:
                    logger.debug("a lease could not be extended: %s", error)

    def close(self) -> None:
        """Give up what has not arrived; returns at the deadline of those at the latest."""
        self._staging.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._sealer.close()
        self._beats.join()


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
