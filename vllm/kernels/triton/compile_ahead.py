# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a start in parallel, before they are needed.

What to compile is not a list to be kept up to date: the warm-up itself runs once with launches
noted instead of made, so the variants are exactly those that serving launches. Triton's compiler
leaves Python for nearly all of its work, so threads of this process are enough, and what they
compile is in its memory, not only on disk. Processes of a host share the work (`compile_lock`):
each compiles what no other one is compiling, and takes the rest from disk.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from triton import knobs

from vllm.kernels.triton import compile_log, launcher
from vllm.kernels.triton.compile_lock import compiling
from vllm.kernels.triton.compiler_start import hash_compiler
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class Variant:
    """A kernel with the types, constants and launch parameters that it is compiled for."""

    kernel: str
    specialization: str
    compile: Callable[[str], Any]


@contextmanager
def noted_launches() -> Iterator[list[Variant]]:
    """Inside the block a kernel that is not compiled yet is noted, not launched.

    Its outputs stay as they were: nothing may follow from their content. A kernel launched several
    times is noted once. Other threads must not launch anything meanwhile.
    """
    noted: dict[tuple[str, str], Variant] = {}

    def note(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        name, what = f"{fn.module}.{fn.name}", compile["specialization_data"]
        noted.setdefault((name, key), Variant(name, what, fn.jit_function.preload))
        return True

    earlier = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    variants: list[Variant] = []
    try:
        with launcher.noting():
            yield variants
    finally:
        knobs.runtime.jit_cache_hook = earlier
        variants += noted.values()


def prepare(one: Variant, device: torch.device) -> Any | None:
    """Compile a kernel and load it onto the device; returns it if it is left to be loaded, when no
    other thread loads one.

    Its launcher is a C function that the host's compiler makes, for longer than many a kernel;
    Triton makes it, and loads the kernel, when `run` is first asked for.
    """
    hash_compiler()
    kernel = one.compile(one.specialization)
    if device.type != "cuda":
        return None
    if not compile_log.begin_launcher(kernel.src.signature):
        return kernel
    with compiling(f"launcher {compile_log.launcher_types(kernel.src.signature)}", wait=True):
        _ = kernel.run
    return None


@dataclass(frozen=True)
class _Job:
    """A variant to be compiled; `done` has what `prepare` returns."""

    variant: Variant
    done: Future[Any] = field(default_factory=Future)

    def run(self, device: torch.device, *, wait: bool) -> bool:
        """Whether it is done: not if another process is compiling it and this one does not
        `wait`."""
        one = self.variant
        with compiling(f"{one.kernel} {one.specialization}", wait=wait) as alone:
            if alone:
                self._prepare(device)
            return alone

    def _prepare(self, device: torch.device) -> None:
        with compile_log.ahead_job():
            try:
                self.done.set_result(prepare(self.variant, device))
            except BaseException as error:
                self.done.set_exception(error)


def _use(device: torch.device) -> None:
    compile_log.ahead_on_this_thread()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _next(queue: SimpleQueue[_Job]) -> _Job | None:
    try:
        return queue.get_nowait()
    except Empty:
        return None


class ParallelCompilation:
    """Compiles `variants` for `device` on threads, from construction on."""

    def __init__(self, variants: list[Variant], device: torch.device) -> None:
        compile_log.install()
        self._began_s = time.monotonic()
        self._known = len(compile_log.compilations())
        workers = max(1, min(len(variants), os.cpu_count() or 1))
        compile_log.begin_ahead(len(variants))
        self._threads = ThreadPoolExecutor(workers, "compile", _use, (device,))
        self._device = device
        self._jobs = [_Job(one) for one in variants]
        self._first: SimpleQueue[_Job] = SimpleQueue()
        #: what other processes were compiling
        self._later: SimpleQueue[_Job] = SimpleQueue()
        for job in self._jobs:
            self._first.put(job)
        for _ in range(workers):
            self._threads.submit(self._work)

    def _work(self) -> None:
        """A thread's part of the jobs: those of other processes last, when they may be done."""
        for queue, wait in ((self._first, False), (self._later, True)):
            while (job := _next(queue)) is not None:
                if not job.run(self._device, wait=wait):
                    self._later.put(job)

    def wait(self) -> None:
        """Block until every kernel can be launched; raises what the compiler raised."""
        try:
            left = [job.done.result() for job in self._jobs]
        finally:
            self._threads.shutdown()
        for kernel in left:
            if kernel is not None:
                _ = kernel.run
        self._log()

    def settle(self) -> None:
        """Block until everything is compiled or has failed; who launches a failure sees it.

        Kernels that are left to be loaded are so by their first launch.
        """
        self._threads.shutdown()
        self._log()

    def _log(self) -> None:
        done = compile_log.compilations()[self._known :]
        logger.info(
            "kernels: %d compiled, %d from the disk cache, in %.1f s beside other work "
            "(%.1f s one after another)",
            sum(not one.cached for one in done),
            sum(one.cached for one in done),
            time.monotonic() - self._began_s,
            sum(one.seconds for one in done),
        )
