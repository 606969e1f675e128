# SPDX-License-Identifier: Apache-2.0
"""Servers behind the proxy: which are alive, and which one is next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(eq=False)
class Instance:
    """A server. `running`: requests of this proxy that it works on."""

    url: str
    healthy: bool = False
    running: int = 0
    turn: int = 0


class Instances:
    """Servers of one kind. The one with the fewest requests is next; among equals the one that had
    its turn longest ago."""

    def __init__(self, kind: str, urls: Iterable[str]) -> None:
        self.kind = kind
        self.all = [Instance(url.rstrip("/")) for url in urls]
        self._turns = 0

    def next(self, tried: Iterable[Instance] = ()) -> Instance | None:
        """A healthy server that was not tried; None if there is none."""
        left = [one for one in self.all if one.healthy and one not in set(tried)]
        return min(left, key=lambda one: (one.running, one.turn), default=None)

    @contextmanager
    def working(self, instance: Instance) -> Iterator[None]:
        """Counts a request while it runs."""
        self._turns += 1
        instance.turn = self._turns
        instance.running += 1
        try:
            yield
        finally:
            instance.running -= 1

    def report(self, instance: Instance, problem: str | None) -> None:
        """What the last contact with a server showed; None: it is well."""
        healthy = problem is None
        if healthy != instance.healthy:
            what = "answers" if healthy else f"is left out: {problem}"
            logger.info("%s server %s %s", self.kind, instance.url, what)
        instance.healthy = healthy

    async def look(self, http: httpx.AsyncClient, timeout_s: float) -> None:
        """Ask all servers how they are."""
        await asyncio.gather(*(self._look(one, http, timeout_s) for one in self.all))

    async def _look(self, instance: Instance, http: httpx.AsyncClient, timeout_s: float) -> None:
        try:
            reply = await http.get(f"{instance.url}/health", timeout=timeout_s)
            self.report(instance, None if reply.is_success else f"health {reply.status_code}")
        except httpx.HTTPError as error:
            self.report(instance, repr(error))
