# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine that hang: how, and the engine's end in any case."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import pytest
from tiny_models import tiny_model

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.multiproc import MultiprocExecutor

#: from the wait to the end of all processes
END_S = 30.0

T = TypeVar("T")


def lie_down() -> None:
    """At once: a signal to the process is for its main thread, and this one would go on a while."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def sleep_long() -> None:
    time.sleep(600)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def descendants() -> set[psutil.Process]:
    """Of this process."""
    return set(psutil.Process().children(recursive=True))


@contextmanager
def executors(**settings: Any) -> Iterator[Callable[..., MultiprocExecutor]]:
    """Makes executors of a tiny model with these `EngineArgs` and further ones."""

    def make(**options: Any) -> MultiprocExecutor:
        args = {"dtype": "float32", "max_model_len": 64, **settings, **options}
        return MultiprocExecutor(
            EngineArgs(str(tiny_model("llama")), **args).create_engine_config()
        )

    with _ended(make, MultiprocExecutor.shutdown) as keep:
        yield keep


@contextmanager
def engines(family: str, **settings: Any) -> Iterator[Callable[..., LLM]]:
    """Makes engines of a tiny model with these `EngineArgs` and further ones, whose cores are
    processes."""

    def make(**options: Any) -> LLM:
        given = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, **settings, **options}
        return LLM(str(tiny_model(family)), kv_cache_memory_bytes=16 * 2**20, **given)

    with pytest.MonkeyPatch.context() as patch, _ended(make, end_cores) as keep:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield keep


def end_cores(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()


@contextmanager
def _ended(make: Callable[..., T], end: Callable[[T], None]) -> Iterator[Callable[..., T]]:
    made: list[T] = []

    def keep(**options: Any) -> T:
        made.append(make(**options))
        return made[-1]

    yield keep
    for one in made:
        end(one)
