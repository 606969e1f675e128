# SPDX-License-Identifier: Apache-2.0
"""Fuzzed requests of many clients of an `AsyncLLM`, whose core has a process of its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.fuzz.book import Tally
from tests.fuzz.reference import Reference
from tests.fuzz.session import STUCK_S, Session
from tests.fuzz.workload import Spec
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError, EngineSleepingError
from vllm.v1.metrics.reader import Gauge

#: gauges of cores without requests, pins included once their time is over
_IDLE = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "replica_waiting_tokens",
)


class ServedSession(Session):
    """One engine, its clients, and somebody who disturbs them."""

    may_have_ranks = True

    async def run(self) -> None:
        engine = self._engine = AsyncLLM(self._config)
        try:
            async with asyncio.timeout(STUCK_S):
                await self._disturbed_clients()
                await engine.wake_up()
                await asyncio.gather(*(self._client(self._pool.draw()) for _ in range(self._width)))
                await self._check_idle()
        except TimeoutError:
            self.book.finding(f"stuck with {list(self.book.live)}")
        except Exception as error:
            self.book.finding(f"the engine failed: {error!r}")
        finally:
            engine.shutdown()
        if self._storage is not None:
            self.book.check_storage(self._storage)

    async def _disturbed_clients(self) -> None:
        rng, clients = self._rng, set[asyncio.Task[None]]()
        others = set[asyncio.Task[None]]()
        left = self._num_requests
        while left or clients or others:
            for _ in range(min(left, rng.choice((0, 1, 2, 6)))):
                left -= 1
                clients.add(asyncio.create_task(self._client(self._pool.draw())))
            roll = rng.random() / self._disturbance
            if roll < 0.1 and clients:
                rng.choice(list(clients)).cancel()  # the client disconnects
            elif roll < 0.2 and self.book.live:
                await self._engine.abort(rng.choice(list(self.book.live)))
            elif roll < 0.4:
                running = rng.random() < 0.7
                others.add(asyncio.create_task(self._reset(running)))
            elif roll < 0.43:
                others.add(asyncio.create_task(self._sleep_and_wake(rng.choice((1, 2)))))
            elif roll < 0.46:
                others.add(asyncio.create_task(self._reload()))
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.01)))
            for task in [task for task in clients | others if task.done()]:
                clients.discard(task)
                others.discard(task)
                if not task.cancelled():
                    task.result()

    async def _client(self, spec: Spec) -> None:
        request_id, conditions = self._begin(spec)
        stream = self._engine.generate(
            conditions.prompt(spec),
            conditions.params(spec),
            request_id,
            priority=conditions.priority,
        )
        try:
            async for output in stream:
                self.book.take(request_id, output)
            self.book.settle()
        except EngineSleepingError:
            pass
        finally:
            await stream.aclose()
            if request_id in self.book.live:
                self.book.left(request_id)

    async def _reset(self, running: bool) -> None:
        await self._engine.reset_prefix_cache(reset_running_requests=running)

    async def _reload(self) -> None:
        try:
            await self._engine.collective_rpc("reload_weights")
        except VLLMValidationError:  # the weights sleep
            pass

    async def _sleep_and_wake(self, level: int) -> None:
        sleep = asyncio.create_task(self._engine.sleep(level, self._rng.choice(("abort", "wait"))))
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.1)))
        tags = self._rng.choice((["weights", "kv_cache"], ["weights"], None))
        await self._engine.wake_up(tags)
        try:
            await sleep
        except (VLLMValidationError, EngineGenerateError):  # called off; another one's level
            pass
        await self._engine.wake_up()

    async def _check_idle(self) -> None:
        """Nothing runs, waits or holds memory, and the last pin ends by itself."""
        for _ in range(100):
            gauges = [one for one in self._engine.get_metrics() if isinstance(one, Gauge)]
            busy = [one for one in gauges if one.name.removeprefix("vllm:") in _IDLE and one.value]
            if not busy:
                break
            await asyncio.sleep(0.05)
        else:
            self.book.finding(f"an idle engine shows {busy}")
        if not await self._engine.reset_prefix_cache():
            self.book.finding("blocks are still held after the last request")


def run_served(
    name: str,
    rng: random.Random,
    family: str,
    reference: Reference,
    storage: Path | None,
    num_requests: int,
) -> Tally:
    """One scenario of an asynchronous engine."""
    session = ServedSession(name, rng, family, reference, storage, num_requests)
    asyncio.run(session.run())
    return session.book.tally
