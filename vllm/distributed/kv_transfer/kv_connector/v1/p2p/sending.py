# SPDX-License-Identifier: Apache-2.0
"""A producer's worker: keeps the state of ended requests in staging memory until it was fetched.

State that nobody asks for goes when its lease ends; whoever intends to fetch it extends the lease.
"""

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import (
    BlockCopies,
    parts,
    segment_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import WEIGHTS, Identity
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import MAX_WAIT_S, P2pStats, SendJob
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import NoRoom, Staging
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Handler, Message, send
from vllm.logger import init_logger

logger = init_logger(__name__)

_NUM_THREADS = 2
#: ended requests that are remembered, so that whoever asks for one is told at once
_NUM_GONE = 4096
_RESET = "it was dropped when the engine's cache was reset"


@dataclass
class _Held:
    """A request's segment and what a reader is told of it; kept until `deadline` (monotonic)."""

    offset: int
    description: dict[str, Any]
    deadline: float


class Sender:
    """`engine_id`: the name under which consumers know this engine. `ended` is called when there is
    something for `take_staged`, by the thread that staged it."""

    def __init__(
        self,
        copies: BlockCopies,
        staging: Staging,
        transport: Transport,
        engine_id: str,
        identity: Identity,
        lease_s: float,
        ended: Callable[[], None],
    ) -> None:
        self._copies, self._staging, self._transport = copies, staging, transport
        self._engine_id, self._identity, self._lease_s = engine_id, identity, lease_s
        self._ended = ended
        self._changed = threading.Condition()
        self._held: dict[str, _Held] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._staged: set[str] = set()
        self._stats = P2pStats()
        self._num_resets = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-p2p-send")
        self._sealer = staging.make_sealer("kv-p2p-seal")
        self._reaper = threading.Thread(target=self._expire, name="kv-p2p-leases", daemon=True)
        self._reaper.start()

    # ---- from the steps ------------------------------------------------------------------------

    def stage(self, job: SendJob) -> None:
        """Take a copy of a request's state, as it is once all steps launched so far have run."""
        self._threads.submit(self._stage, job, self._copies.mark(), self._num_resets)

    def withdraw(self, req_id: str) -> None:
        """A request's state is not handed on; its blocks are not needed."""
        with self._changed:
            self._forget(req_id, _RESET)
            self._staged.add(req_id)
            self._changed.notify_all()
        self._ended()

    def reset(self, weights: list[Any]) -> None:
        """Drop all that is kept, or on its way there; from here on the weights are these."""
        with self._changed:
            self._num_resets += 1
            self._identity = {**self._identity, WEIGHTS: weights}
            for req_id in list(self._held):
                self._release(req_id, _RESET)
            self._changed.notify_all()

    def take_staged(self) -> set[str]:
        """Requests whose blocks are not needed any more."""
        with self._changed:
            staged, self._staged = self._staged, set()
        return staged

    def take_stats(self) -> P2pStats:
        with self._changed:
            stats, self._stats = self._stats, P2pStats()
        return stats

    def _stage(self, job: SendJob, after: torch.cuda.Event | None, num_resets: int) -> None:
        reason = "its state could not be staged"
        try:
            if self._is_gone(job.req_id):
                return
            held = self._seal(job, after)
            with self._changed:
                if self._is_gone(job.req_id):
                    self._staging.free(held.offset)
                elif num_resets == self._num_resets:
                    held.description[WEIGHTS] = self._identity.get(WEIGHTS)
                    self._held[job.req_id] = held
                    self._stats.add(sent_requests=1, sent_bytes=held.description["bytes"])
                else:
                    self._staging.free(held.offset)
                    reason = _RESET
            return
        except NoRoom as error:
            reason = str(error)
            level = logging.DEBUG if self._closed else logging.ERROR
            logger.log(level, "request %s is not handed on: %s", job.req_id, error)
        except Exception:
            logger.exception("request %s is not handed on", job.req_id)
        finally:
            with self._changed:
                if job.req_id not in self._held and not self._is_gone(job.req_id):
                    self._forget(job.req_id, reason)
                    self._stats.add(failed_sends=1)
                self._staged.add(job.req_id)
                self._changed.notify_all()
            self._ended()

    def _is_gone(self, req_id: str) -> bool:
        """A peer may need nothing of a request before its state has been staged."""
        with self._changed:
            return req_id in self._gone

    def _seal(self, job: SendJob, after: torch.cuda.Event | None) -> _Held:
        plan = self._copies.plan
        size = segment_bytes(plan, job.places)
        offset = self._staging.allocate(size, self._lease_s)
        try:
            segment = self._staging.buffer[offset : offset + size]
            self._copies.to_staging(job.places, segment, after)
            seals: list[list[tuple[int, int]]] = [[] for _ in job.places]
            indices = [place.nth for own in job.places for place in own]
            staged = list(parts(plan, job.places))
            began = time.perf_counter()
            found = self._sealer.digests(segment, [(at, length) for _, _, at, length in staged])
            with self._changed:
                self._stats.add(seal_bytes=size, seal_seconds=time.perf_counter() - began)
            for index, (group, *_), sealed in zip(indices, staged, found, strict=True):
                seals[group].append((index, sealed))
        except BaseException:
            self._staging.free(offset)
            raise
        description = {
            "offset": offset,
            "bytes": size,
            "num_tokens": job.num_tokens,
            "tokens_digest": job.tokens_digest,
            "blocks": seals,
        }
        return _Held(offset, description, time.monotonic() + self._lease_s)

    # ---- from peers ----------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "hello": self._hello,
            "describe": self._describe,
            "extend": self._extend,
            "done": self._done,
            **self._transport.handlers(),
        }

    def _hello(self, connection: socket.socket, message: Message) -> None:
        reply = {
            "engine_id": self._engine_id,
            "identity": self._identity,
            "lease_s": self._lease_s,
            "transport": self._transport.describe(),
        }
        send(connection, reply)

    def _describe(self, connection: socket.socket, message: Message) -> None:
        """Answers when the state is there, or will not be. A request may be asked for before this
        worker has heard of its end."""
        req_id, wait_s = str(message["req_id"]), float(message["wait_s"])
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise ValueError(f"wait_s {wait_s}: 0 to {MAX_WAIT_S:g}")
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not (
                self._closed
                or req_id in self._held
                or req_id in self._gone
                or message["engine_id"] != self._engine_id
                or (left := deadline - time.monotonic()) <= 0
            ):
                self._changed.wait(left)
            held, gone = self._held.get(req_id), self._gone.get(req_id)
        if message["engine_id"] != self._engine_id:
            reply = {"error": f"this is engine {self._engine_id}, not {message['engine_id']}"}
        elif held is not None:
            reply = held.description
        else:
            reply = {"error": f"no state of request {req_id}: {gone or 'not known here'}"}
        send(connection, reply)

    def _extend(self, connection: socket.socket, message: Message) -> None:
        until = time.monotonic() + self._lease_s
        with self._changed:
            for req_id in message["req_ids"]:
                if (held := self._held.get(str(req_id))) is not None:
                    held.deadline = max(held.deadline, until)
        send(connection, {})

    def _done(self, connection: socket.socket, message: Message) -> None:
        with self._changed:
            self._release(str(message["req_id"]), "it was fetched or given up")
        send(connection, {})

    # ---- leases --------------------------------------------------------------------------------

    def _expire(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for req_id in [r for r, held in self._held.items() if held.deadline <= now]:
                    self._release(req_id, f"its lease of {self._lease_s:g} s ended")
                    self._stats.add(expired_leases=1)
                    logger.warning("request %s: nobody fetched its state in time", req_id)
                nearest = min((held.deadline for held in self._held.values()), default=None)
                self._changed.wait(None if nearest is None else max(0.0, nearest - now))

    def _release(self, req_id: str, reason: str) -> None:
        held = self._held.pop(req_id, None)
        if held is not None:
            self._staging.free(held.offset)
        self._forget(req_id, reason)

    def _forget(self, req_id: str, reason: str) -> None:
        self._gone[req_id] = reason
        if len(self._gone) > _NUM_GONE:
            self._gone.popitem(last=False)

    def close(self) -> None:
        """Give up what was not fetched."""
        self._staging.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=True)
        self._sealer.close()
        self._reaper.join()
