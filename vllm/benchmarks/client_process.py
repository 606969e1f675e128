# SPDX-License-Identifier: Apache-2.0
"""What one process of a load does. It imports little, as every load starts a few of them."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from vllm.benchmarks.client import DIALECTS, RequestOptions
from vllm.benchmarks.client_usage import ClientUsage, UsageClock
from vllm.benchmarks.connection import ConnectionPool, Endpoint
from vllm.benchmarks.load import Share, ShareSender, allow_many_connections, tls_context, wait_until
from vllm.benchmarks.outcome import Outcome

_REPORT_S = 0.1


@dataclass(frozen=True)
class ShareReport:
    """What a process sends when it is done; `end_s` counts from the start of the load."""

    outcomes: list[Outcome]
    usage: ClientUsage
    end_s: float


def run_share(
    pipe: Connection, backend: str, options: RequestOptions, share: Share, verify: bool
) -> None:
    """A client process: says that it is ready, gets the start, sends progress and a report."""
    # The parent is interrupted too, and ends the processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_connections()
    uvloop.run(_send_share(pipe, backend, options, share, verify))


async def _send_share(
    pipe: Connection, backend: str, options: RequestOptions, share: Share, verify: bool
) -> None:
    endpoint = Endpoint(options.url)
    context = tls_context(verify) if endpoint.tls else None
    pool = ConnectionPool(endpoint, context)
    sender = ShareSender(pool, DIALECTS[backend], options, share)
    await sender.prepare()
    pipe.send(None)
    epoch: float = pipe.recv()
    await wait_until(epoch)
    clock = UsageClock()
    counter = _Counter()
    reporting = asyncio.ensure_future(counter.report(pipe))
    await sender.send(epoch, counter.count)
    usage, end_s = clock.usage(), time.perf_counter() - epoch
    reporting.cancel()
    pool.close()
    counter.flush(pipe)
    pipe.send(ShareReport(sender.outcomes(epoch), usage, end_s))


class _Counter:
    """Requests that ended since they were last reported."""

    def __init__(self) -> None:
        self._new = 0

    def count(self) -> None:
        self._new += 1

    def flush(self, pipe: Connection) -> None:
        if self._new:
            pipe.send(self._new)
            self._new = 0

    async def report(self, pipe: Connection) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_REPORT_S)
            self.flush(pipe)
