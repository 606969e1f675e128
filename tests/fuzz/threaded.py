# SPDX-License-Identifier: Apache-2.0
"""Fuzzed requests of several threads that share one `LLM`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fuzz.book import Book, Tally
from tests.fuzz.engines import draw_options, make_arguments
from tests.fuzz.reference import Reference
from tests.fuzz.session import STUCK_S
from tests.fuzz.workload import Conditions, Spec, SpecPool, Workload
from vllm import LLM, RequestOutput

NUM_THREADS = 3

Asked = tuple[str, Spec, Conditions]


def run_threaded(
    name: str,
    rng: random.Random,
    family: str,
    reference: Reference,
    storage: Path | None,
    num_requests: int,
) -> Tally:
    """One scenario: every thread generates for lists of prompts, and one disturbs the others."""
    options = draw_options(rng, family, storage is not None)
    work = Workload(rng, storage is not None, options["scheduling_policy"] == "priority")
    pool = SpecPool(rng, work, reference, 3 + num_requests // 4)
    book = Book(f"{name} {family} {options}", reference)
    plans = _plan(rng, book, work, pool, num_requests)
    multiprocess = rng.choice("01")
    with mock.patch.dict("os.environ", VLLM_ENABLE_V1_MULTIPROCESSING=multiprocess):
        llm = LLM(**make_arguments(family, storage, **options))
    threads = ThreadPoolExecutor(NUM_THREADS + 1)
    try:
        calls = [threads.submit(_generate, llm, plan) for plan in plans]
        disturbing = threads.submit(_disturb, llm, random.Random(rng.random()))
        for plan, call in zip(plans, calls, strict=True):
            for asked, outputs in zip(plan, call.result(STUCK_S), strict=True):
                for (request_id, _, _), output in zip(asked, outputs, strict=True):
                    book.take(request_id, output)
        disturbing.result(STUCK_S)
        book.settle()
        if not llm.reset_prefix_cache():
            book.finding("blocks are still held after the last request")
    except Exception as error:
        book.finding(f"the engine failed: {error!r}")
    finally:
        llm.shutdown()
        threads.shutdown(wait=False, cancel_futures=True)
    if storage is not None:
        book.check_storage(storage)
    return book.tally


def _plan(
    rng: random.Random, book: Book, work: Workload, pool: SpecPool, num_requests: int
) -> list[list[list[Asked]]]:
    """For every thread the batches it generates, drawn beforehand: the reference has no threads."""
    plans: list[list[list[Asked]]] = [[] for _ in range(NUM_THREADS)]
    count = 0
    while count < num_requests:
        batch: list[Asked] = []
        for _ in range(rng.randint(1, 6)):
            spec = pool.draw()
            asked = (f"r{count}", spec, work.conditions(spec))
            book.begin(*asked)
            batch.append(asked)
            count += 1
        rng.choice(plans).append(batch)
    return plans


def _generate(llm: LLM, plan: list[list[Asked]]) -> list[list[RequestOutput]]:
    return [
        llm.generate(
            [conditions.prompt(spec) for _, spec, conditions in batch],
            [conditions.params(spec) for _, spec, conditions in batch],
            use_tqdm=False,
            priority=[conditions.priority for _, _, conditions in batch],
        )
        for batch in plan
    ]


def _disturb(llm: LLM, rng: random.Random) -> None:
    calls: list[Any] = [
        lambda: llm.reset_prefix_cache(reset_running_requests=True),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.collective_rpc("reload_weights"),
    ]
    for _ in range(6):
        rng.choice(calls)()
