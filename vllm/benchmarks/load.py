# SPDX-License-Identifier: Apache-2.0
"""One process's share of a load: every request at its time."""

from __future__ import annotations

import asyncio
import gc
import resource
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.benchmarks.client import Dialect, Exchange, RequestOptions, encode_request, send
from vllm.benchmarks.connection import ConnectionPool, Endpoint, ExchangeError
from vllm.benchmarks.outcome import Outcome, Sample
from vllm.entrypoints.cli.types import CommandError

#: seconds between attempts to reach a server that is still starting
RETRY_S = 1.0
#: bodies that are kept unread while a load runs; past this, finished replies are read at once
_MAX_UNREAD_BYTES = 256 << 20


@dataclass(frozen=True)
class Share:
    """Requests of one process. `times_s[i]` is when `samples[i]` is sent, `indices[i]` its number
    in the whole load; at most `max_concurrency` are in flight."""

    samples: Sequence[Sample]
    times_s: Sequence[float]
    indices: Sequence[int]
    max_concurrency: int | None


def tls_context(verify: bool) -> ssl.SSLContext:
    """The certificates that httpx trusts, or none that must be."""
    import httpx  # half of what a client process would import

    return httpx.create_ssl_context(verify=verify)


def allow_many_connections() -> None:
    """Every request in flight is an open file, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def wait_until_ready(
    pool: ConnectionPool,
    dialect: Dialect,
    options: RequestOptions,
    sample: Sample,
    timeout_s: float,
) -> None:
    """Send `sample` until it succeeds; `CommandError` with the last error after `timeout_s`."""
    began = time.perf_counter()
    request = encode_request(Endpoint(options.url), dialect, options, sample, -1)
    while error := (await send(pool, request)).measure(dialect, began, 0).error:
        if time.perf_counter() - began + RETRY_S > timeout_s:
            raise CommandError(f"the server is not ready after {timeout_s:g} s: {error}")
        await asyncio.sleep(RETRY_S)


async def wait_until(time_s: float) -> None:
    """Sleep until that time of `time.perf_counter`, never less: timers of an event loop may end up
    to a millisecond early."""
    while (delay := time_s - time.perf_counter()) > 0:
        await asyncio.sleep(delay)


class ShareSender:
    """Sends a share. Requests are encoded on creation, replies are read when all have come."""

    def __init__(
        self, pool: ConnectionPool, dialect: Dialect, options: RequestOptions, share: Share
    ) -> None:
        self._pool = pool
        self._dialect = dialect
        self._share = share
        endpoint = Endpoint(options.url)
        self._requests = [
            encode_request(endpoint, dialect, options, sample, index)
            for sample, index in zip(share.samples, share.indices, strict=True)
        ]
        self._num_unread_bytes = 0
        self._finished: list[Exchange | Outcome | None] = [None] * len(self._requests)

    async def prepare(self) -> None:
        """What should not happen while the load runs: looking up the host, collecting garbage."""
        try:
            (await self._pool.connect()).close()
        except ExchangeError:
            return  # every request will say so
        finally:
            gc.collect()
            gc.freeze()

    async def send(self, epoch: float, on_finished: Callable[[], object]) -> None:
        """Send every request at its time after `epoch`, later only when too many are in flight.

        `epoch` is a time of `time.perf_counter`. `on_finished` is called once per request.
        """
        limit = asyncio.Semaphore(self._share.max_concurrency or max(1, len(self._requests)))

        async def one(position: int) -> None:
            try:
                exchange = await send(self._pool, self._requests[position])
            finally:
                limit.release()
            self._keep(position, exchange, epoch)
            on_finished()

        tasks = []
        for position, time_s in enumerate(self._share.times_s):
            await wait_until(epoch + time_s)
            await limit.acquire()
            tasks.append(asyncio.ensure_future(one(position)))
        await asyncio.gather(*tasks)

    def outcomes(self, epoch: float) -> list[Outcome]:
        """One per request, in their order; reads what is unread."""
        return [
            self._measure(position, finished, epoch) if isinstance(finished, Exchange) else finished
            for position, finished in enumerate(self._finished)
            if finished is not None
        ]

    def _keep(self, position: int, exchange: Exchange, epoch: float) -> None:
        size = len(exchange.reply.body)
        if self._num_unread_bytes + size > _MAX_UNREAD_BYTES:
            self._finished[position] = self._measure(position, exchange, epoch)
        else:
            self._finished[position] = exchange
            self._num_unread_bytes += size

    def _measure(self, position: int, exchange: Exchange, epoch: float) -> Outcome:
        prompt_len = self._share.samples[position].prompt_len or 0
        return exchange.measure(self._dialect, epoch, prompt_len)
