# SPDX-License-Identifier: Apache-2.0
"""Steps that replicas which share experts take together, seen from one engine core.

Before a step each core tells all others what it would run, and all launch the least shape that
covers everything. A core without tokens tells nothing until another one does; then it joins with
padding. So there is no step unless some replica has tokens, and nobody needs to say that there is
nothing left. Only cores talk, while their devices run the step before: no device is waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from vllm import decisions
from vllm.config import VllmConfig
from vllm.utils.waiting import waiting_for
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.engine.replica_mesh import CHECK_S, connect_replicas, names

#: number of the step, then the fields of a `StepShape`
_OFFER = struct.Struct("<qqqq?q")
_NUMBER = struct.Struct("<q")
#: when a core failed, by the host's monotonic clock
_FAILS = struct.Struct("<d")
#: the last words of a core that stops
_LEAVES = b"leaves"
#: of a core that waits until all others say so, too
_ARRIVES = b"arrives"
#: whether a core is there, and that it is
_ASKS, _ANSWERS = b"asks", b"answers"
#: how long the error of a step waits for the end of another replica, which may be its cause, and
#: for the answer of one that may hang
_BLAME_S = 1.0

#: takes what ends this core, None if another one offers a step
Wake = Callable[[Exception | None], None]


class ReplicaLostError(RuntimeError):
    """Another replica ended, and its experts with it."""


class JointSteps:
    """`links`: sockets to the other cores, by rank, whole messages each; closed with this. A
    replica that offers nothing for `timeout_s` while another one waits is an error. While one is
    waited for, `check` is called, which raises when waiting is of no use any more."""

    def __init__(
        self, links: Mapping[int, socket.socket], timeout_s: float, check: Callable[[], None]
    ) -> None:
        self._links = dict(links)
        self._check = check
        self._timeout_s = timeout_s
        self._closed = False
        self._step = 0
        self._offers: dict[int, dict[int, StepShape]] = defaultdict(dict)
        self._arrivals = 0
        self._arrived = dict.fromkeys(links, 0)
        self._answered: set[int] = set()
        self._failed_s: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._wake: Wake = lambda error: None
        self._stop_read, self._stop_write = os.pipe()
        self._reader = threading.Thread(target=self._read, name="joint-steps", daemon=True)

    # ---- start ---------------------------------------------------------------------------------

    def least(self, number: int) -> int:
        """The smallest of all replicas' numbers; each asks as often as the others, before
        `begin`."""
        for rank in self._links:
            self._send(rank, _NUMBER.pack(number))
        numbers = [number]
        for rank, link in self._links.items():
            with waiting_for("the start of other replicas"):
                while not select.select([link], [], [], CHECK_S)[0]:
                    self._check()
            if not (message := _received(link)):
                raise self._lost(rank)
            numbers += _NUMBER.unpack(message)
        return min(numbers)

    def begin(self) -> None:
        """From here on other cores are heard. No process may be forked any more."""
        self._reader.start()

    def set_wake(self, wake: Wake) -> None:
        """`wake` is called on another thread when there is a step to join, and when another
        replica ends."""
        self._wake = wake
        for rank in self._lost_ranks:
            wake(self._lost(rank))

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def is_called(self) -> bool:
        """Whether another replica waits for this one to take the next step."""
        return bool(self._offers.get(self._step))

    def join(self, own: StepShape) -> StepShape | None:
        """What all replicas launch the next step as, once all have said what they have; None if
        this one has nothing and nobody waits for it.

        Raises `ReplicaLostError`, and `TimeoutError` naming the replicas that did not come.
        """
        if not own.num_tokens and not self.is_called:
            return None
        offer = _OFFER.pack(
            self._step, own.num_tokens, own.num_reqs, own.num_prefills, own.decode_only, own.width
        )
        for rank in self._links:
            self._send(rank, offer)
        with self._changed:
            offers = self._offers[self._step]
            self._wait_for(
                lambda: len(offers) == len(self._links) or bool(self._gone - offers.keys()),
                "other replicas' offers of a step",
            )
            missing = sorted(self._links.keys() - offers.keys())
            if gone := self._gone.intersection(missing):
                raise self._lost(min(gone))
            if missing:
                raise TimeoutError(
                    f"{names(missing)} did not come to a step that all take together within "
                    f"{self._timeout_s:g} s; if steps may take that long, set "
                    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
                )
            del self._offers[self._step]
            self._step += 1
        return StepShape.covering((own, *offers.values()))

    def wait(self, result: Future[Any], timeout_s: float, for_calls: bool = False) -> bool:
        """Wait for the result of a step, or with `for_calls` until another replica waits for this
        one; whether that came first. Raises `ReplicaLostError`."""
        result.add_done_callback(self._notify)
        with self._changed:
            self._changed.wait_for(
                lambda: result.done() or bool(self._lost_ranks) or (for_calls and self.is_called),
                timeout_s,
            )
            if self._lost_ranks and not result.done():
                raise self._lost(min(self._lost_ranks))
        return not result.done() and for_calls and self.is_called

    def meet(self, join: Callable[[], None]) -> None:
        """Wait until all replicas have called this; `join` takes a step of padding, as often as one
        that is not there yet needs it. Raises as `join` does."""
        self._arrivals += 1
        for rank in self._links:
            self._send(rank, _ARRIVES)
        while absent := [rank for rank, count in self._arrived.items() if count < self._arrivals]:
            with self._changed:
                self._wait_for(
                    lambda: (
                        min(self._arrived.values()) == self._arrivals
                        or self.is_called
                        or bool(self._gone)
                    ),
                    "other replicas to hear of a call",
                )
            if self.is_called:
                join()
            elif gone := self._gone.intersection(absent):
                raise self._lost(min(gone))
            elif min(self._arrived.values()) < self._arrivals:
                raise TimeoutError(f"{names(absent)} did not come within {self._timeout_s:g} s")

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds, or for as long as a step may take; `_changed` is held."""
        deadline = time.monotonic() + self._timeout_s
        with waiting_for(what):
            while not condition() and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left_s, CHECK_S))
                self._check()

    def _notify(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def cause_of(self, error: BaseException) -> BaseException:
        """The error to report: a step fails, too, when another replica dies in the middle of it, or
        has failed just before; which is then seen soon."""
        now_s = time.monotonic()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(_FAILS.pack(now_s))
        with self._changed:
            self._changed.wait_for(lambda: bool(self._lost_ranks), _BLAME_S)
            failed_s = dict.fromkeys(self._lost_ranks, 0.0) | self._failed_s
        failed_s = {rank: at_s for rank, at_s in failed_s.items() if at_s < now_s}
        return self._lost(min(failed_s, key=failed_s.__getitem__)) if failed_s else error

    def silent(self) -> list[int]:
        """The replicas whose cores do not answer, for errors; needs a second if there are any."""
        with self._changed:
            self._answered.clear()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(_ASKS)
        with self._changed:
            self._changed.wait_for(lambda: self._answered == self._links.keys(), _BLAME_S)
            return sorted(self._links.keys() - self._answered)

    # ---- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """This core has nothing more to offer, and joins the others' steps until all say so."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has stopped already
                link.send(_LEAVES)

    @property
    def all_leave(self) -> bool:
        """Whether no other replica will offer anything any more."""
        return self._links.keys() <= self._leaving | self._gone

    def close(self) -> None:
        """Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._reader.ident is not None:
            os.write(self._stop_write, b"x")
            self._reader.join()
        for link in self._links.values():
            link.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    # ---- messages ------------------------------------------------------------------------------

    @property
    def _lost_ranks(self) -> set[int]:
        return self._gone - self._leaving

    @staticmethod
    def _lost(rank: int) -> ReplicaLostError:
        return ReplicaLostError(f"{names([rank])} ended; those that share its experts end, too")

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._links[rank].send(message)
        except OSError:
            raise self._lost(rank) from None

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    message = _received(self._links[key.data])
                    if message == _ASKS:
                        with contextlib.suppress(OSError):
                            self._links[key.data].send(_ANSWERS)
                        continue
                    if not message:
                        selector.unregister(key.fileobj)
                    self._take(key.data, message)

    def _take(self, rank: int, message: bytes) -> None:
        with self._changed:
            if not message:
                self._gone.add(rank)
            elif message == _LEAVES:
                self._leaving.add(rank)
            elif message == _ARRIVES:
                self._arrived[rank] += 1
            elif len(message) == _FAILS.size:
                (self._failed_s[rank],) = _FAILS.unpack(message)
            elif message == _ANSWERS:
                self._answered.add(rank)
            else:
                step, tokens, reqs, prefills, decode_only, width = _OFFER.unpack(message)
                shape = StepShape(tokens, reqs, prefills, decode_only, width)
                self._offers[step][rank] = shape
            self._changed.notify_all()
        self._wake(self._lost(rank) if rank in self._lost_ranks else None)


def meet_replicas(
    vllm_config: VllmConfig, timeout_s: float, check: Callable[[], None]
) -> JointSteps:
    """Connect to the cores of the other replicas, whose workers have met by now."""
    parallel = vllm_config.parallel_config
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    decisions.record(
        "steps of replicas",
        "taken together",
        "--enable-expert-parallel: each replica has a part of the experts, and runs them for all",
    )
    directory, longest_s = parallel.meeting_directory, parallel.hosts_timeout_s
    with waiting_for("the start of other replicas"):
        links = connect_replicas(directory, rank, size, longest_s, check)
    return JointSteps(links, timeout_s, check)


def _received(link: socket.socket) -> bytes:
    """One message; nothing at the end of the other process."""
    try:
        return link.recv(_OFFER.size)
    except OSError:
        return b""
