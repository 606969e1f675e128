# SPDX-License-Identifier: Apache-2.0
"""Sending all requests of a benchmark, each at its time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import httpx
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vllm.benchmarks.client import Dialect, Requester, RequestOptions
from vllm.benchmarks.datasets import Sample
from vllm.benchmarks.outcome import Outcome
from vllm.entrypoints.cli.types import CommandError

#: seconds between attempts to reach a server that is still starting
RETRY_S = 1.0


async def wait_until_ready(
    http: httpx.AsyncClient,
    dialect: Dialect,
    options: RequestOptions,
    sample: Sample,
    timeout_s: float,
) -> None:
    """Send `sample` until it succeeds; `CommandError` with the last error after `timeout_s`."""
    began = time.perf_counter()
    requester = Requester(http, dialect, options, began)
    while (outcome := await requester.send(sample, -1)).error is not None:
        if time.perf_counter() - began + RETRY_S > timeout_s:
            raise CommandError(f"the server is not ready after {timeout_s:g} s: {outcome.error}")
        await asyncio.sleep(RETRY_S)


async def send_all(
    http: httpx.AsyncClient,
    dialect: Dialect,
    options: RequestOptions,
    samples: Sequence[Sample],
    times_s: NDArray[np.float64],
    max_concurrency: int | None = None,
    show_progress: bool = True,
) -> tuple[list[Outcome], float]:
    """Outcomes in the order of `samples`, and the seconds it all took.

    A request is sent at its time in `times_s`, later only when `max_concurrency` are in flight.
    """
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    epoch = time.perf_counter()
    requester = Requester(http, dialect, options, epoch)
    with tqdm(total=len(samples), unit="req", disable=not show_progress, dynamic_ncols=True) as bar:

        async def send(index: int) -> Outcome:
            await asyncio.sleep(times_s[index] - (time.perf_counter() - epoch))
            async with limit:
                outcome = await requester.send(samples[index], index)
            bar.update()
            return outcome

        outcomes = await asyncio.gather(*(send(index) for index in range(len(samples))))
    return list(outcomes), time.perf_counter() - epoch
