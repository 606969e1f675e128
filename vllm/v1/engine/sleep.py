# SPDX-License-Identifier: Apache-2.0
"""Sleep mode, seen from the engine core: when it may sleep, and what it does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

#: what can be woken separately
TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)
ASLEEP = "the engine sleeps and takes no requests; wake it up first"


@dataclass(frozen=True)
class SleepState:
    """The tags of what sleeps of a core, and at which level; nothing by default."""

    level: int = 0
    asleep: frozenset[str] = frozenset()


def check_sleep(vllm_config: VllmConfig, level: int) -> None:
    """Raise `VLLMValidationError` if the engine may not sleep like that."""
    assert vllm_config.model_config is not None
    if not vllm_config.model_config.enable_sleep_mode:
        raise VLLMValidationError(
            "sleeping needs enable_sleep_mode=True (--enable-sleep-mode)", "enable_sleep_mode"
        )
    if level not in LEVELS:
        raise VLLMValidationError(
            f"sleep level must be 1 (weights to host memory) or 2 (weights dropped), got {level!r}",
            "level",
            level,
        )


def check_mode(mode: str, known: Sequence[str] = ("abort", "wait")) -> None:
    """Raise `VLLMValidationError` unless it is one of the things that can become of running
    requests."""
    if mode not in known:
        *others, last = map(repr, known)
        raise VLLMValidationError(
            f"mode must be {', '.join(others)} or {last}, got {mode!r}", "mode", mode
        )


def check_tags(tags: Iterable[str] | None) -> tuple[str, ...]:
    """The tags to wake, all for None; raises `VLLMValidationError` for an unknown one."""
    chosen = TAGS if tags is None else tuple(tags)
    if unknown := [tag for tag in chosen if tag not in TAGS]:
        raise VLLMValidationError(
            f"unknown wake-up tags {unknown}; known: {', '.join(TAGS)}", "tags", unknown
        )
    return chosen


class FrontEndSleep:
    """What a front end knows of its core's sleep: `asleep`, the tags of what sleeps, and the sleeps
    that still wait for requests to end, which a wake-up calls off."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self._waiting: set[object] = set()

    @property
    def is_sleeping(self) -> bool:
        """Whether any part sleeps or is about to: new requests are refused."""
        return bool(self.asleep or self._waiting)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[], None]]:
        """For the time a sleep waits for requests to end. Yields a check, which raises
        `VLLMValidationError` once a wake-up has called the sleep off."""
        sleep = object()

        def check() -> None:
            if sleep not in self._waiting:
                raise VLLMValidationError("the engine was woken up before it slept", "mode")

        self._waiting.add(sleep)
        try:
            yield check
        finally:
            self._waiting.discard(sleep)

    def call_off(self) -> None:
        """Stop the sleeps that wait."""
        self._waiting.clear()

    @contextmanager
    def falling_asleep(self) -> Iterator[None]:
        """For the call that puts the core to sleep; only one call at a time may change it."""
        before, self.asleep = self.asleep, set(TAGS)
        try:
            yield
        except BaseException:
            self.asleep = before
            raise

    def fell_asleep(self) -> None:
        """Another front end has put the core to sleep."""
        self.asleep = set(TAGS)

    def woke_up(self, tags: Iterable[str]) -> None:
        """These are awake again."""
        self.asleep.difference_update(tags)


class CoreSleep:
    """Puts a core's workers to sleep, once it is idle, and wakes them up.

    `drain` takes the core through the steps that remain without a request.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        scheduler: SchedulerInterface,
        executor: Executor,
        drain: Callable[[], None],
    ) -> None:
        self._vllm_config = vllm_config
        self._scheduler = scheduler
        self._executor = executor
        self._drain = drain
        self._level = 0
        self.asleep: set[str] = set()

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, level: int) -> None:
        """Raises `VLLMValidationError` for a bad level, or if the engine sleeps otherwise,
        `RuntimeError` if it is busy; and what fails on a worker, when all are awake again."""
        check_sleep(self._vllm_config, level)
        if self.is_sleeping:
            if level == self._level and self.asleep == set(TAGS):
                return
            asleep = ", ".join(sorted(self.asleep))
            raise VLLMValidationError(
                f"the engine sleeps at level {self._level} ({asleep}); wake it up first",
                "level",
                level,
            )
        if self._scheduler.has_unfinished_requests():
            raise RuntimeError("the engine cannot sleep while requests run; abort them first")
        self._drain()
        # What wakes up from level 2 may have other weights: a connector's store is of no use then.
        if not self._scheduler.reset_prefix_cache(reset_connector=level == 2):
            raise RuntimeError("the engine cannot sleep: state blocks are still in use")
        self._drain()  # what a connector has to do for that: no step finds its memory asleep
        begin = time.monotonic()
        self._level, self.asleep = level, set(TAGS)
        try:
            released = sum(self._executor.collective_rpc("sleep", args=(level,)))
        except Exception:
            self.wake_up()
            raise
        elapsed = time.monotonic() - begin
        logger.info(
            "asleep (level %d): %.2f GiB released in %.2f s", level, released / 2**30, elapsed
        )

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        chosen = check_tags(tags)
        begin = time.monotonic()
        self._executor.collective_rpc("wake_up", args=(chosen,))
        self.asleep.difference_update(chosen)
        left = f", {', '.join(sorted(self.asleep))} still asleep" if self.asleep else ""
        logger.info("awake in %.2f s%s", time.monotonic() - begin, left)
