# SPDX-License-Identifier: Apache-2.0
"""Fuzzed requests on engines of this process, one or two of them, stepped by the test."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.reference import Reference
from tests.fuzz.session import STUCK_S, Session
from tests.fuzz.workload import Spec
from vllm.v1.engine.llm_engine import LLMEngine


class OfflineSession(Session):
    """One engine and what happens to it; `tick` does one random thing."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        family: str,
        reference: Reference,
        storage: Path | None,
        num_requests: int,
    ) -> None:
        super().__init__(name, rng, family, reference, storage, num_requests)
        self._left = num_requests
        self._engine = LLMEngine(self._config, log_stats=False, multiprocess=False)

    @property
    def done(self) -> bool:
        return not self._left and not self.book.live

    def tick(self) -> None:
        roll = self._rng.random()
        if self._left and roll < 0.15:
            for _ in range(min(self._left, self._rng.choice((1, 1, 2, 6)))):
                self._left -= 1
                self._submit(self._pool.draw())
        elif roll < 0.15 + 0.05 * self._disturbance:
            self._disturb()
        else:
            self._step()

    def _disturb(self) -> None:
        disturbances = (self._abort_one, self._reset, self._sleep, self._reload)
        self._rng.choices(disturbances, (5, 10, 1, 1))[0]()

    def finish(self) -> None:
        """With no request left: see that nothing of any is, use every row once more, and close."""
        for _ in range(self._width):
            self._submit(self._pool.draw())
        while self.book.live:
            self._step()
        if not self._engine.reset_prefix_cache():
            self.book.finding("blocks are still held after the last request")
        self.close()
        if self._storage is not None:
            self.book.check_storage(self._storage)

    def close(self) -> None:
        self._engine.shutdown()

    # ---- what can happen -----------------------------------------------------------------------

    def _submit(self, spec: Spec) -> None:
        request_id, conditions = self._begin(spec)
        self._engine.add_request(
            request_id,
            conditions.prompt(spec),
            conditions.params(spec),
            priority=conditions.priority,
        )

    def _step(self) -> None:
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self.book.take(output.request_id, output)
        if not self._engine.has_unfinished_requests():
            self.book.settle()

    def _reset(self) -> None:
        """Once, or again and again before much is computed."""
        for _ in range(self._rng.choice((1, 1, 3))):
            running = self._rng.random() < 0.7
            self._engine.reset_prefix_cache(reset_running_requests=running)
            for _ in range(self._rng.randrange(4)):
                self._step()

    def _reload(self) -> None:
        self._engine.collective_rpc("reload_weights")

    def _abort_one(self) -> None:
        if self.book.live:
            self._abort([self._rng.choice(list(self.book.live))])

    def _abort(self, request_ids: list[str]) -> None:
        for output in self._engine.abort_request(request_ids):
            self.book.take(output.request_id, output)
        for request_id in request_ids:
            if request_id in self.book.live:  # one of n completions had its end; no last output
                self.book.left(request_id)

    def _sleep(self) -> None:
        self._abort(list(self.book.live))
        self._engine.sleep(self._rng.choice((1, 2)))
        for tags in self._rng.choice(((None,), (["weights"], ["kv_cache"]), (["kv_cache"], None))):
            self._engine.wake_up(tags)


def run_offline(rng: random.Random, sessions: Sequence[OfflineSession]) -> None:
    """Take the sessions to their end, in turns as they come."""
    deadline = time.monotonic() + STUCK_S
    try:
        while busy := [session for session in sessions if not session.done]:
            session = rng.choice(busy)
            session.tick()
            if time.monotonic() > deadline:
                session.book.finding(f"stuck with {list(session.book.live)}")
                return
        for session in sessions:
            session.finish()
    except Exception as error:
        for session in sessions:
            session.book.finding(f"the engine failed: {error!r}")
    finally:
        for session in sessions:
            session.close()
