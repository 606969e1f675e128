# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a start in parallel, before they are needed.

What to compile is not a list to be kept up to date: the warm-up itself runs once with launches
noted instead of made, so the variants are exactly those that serving launches. Triton's compiler
leaves Python for nearly all of its work, so threads of this process are enough, and what they
compile is in its memory, not only on disk.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from vllm.kernels.triton import compile_log
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
    _ = kernel.run
    return None


def _prepare_ahead(one: Variant, device: torch.device) -> Any | None:
    with compile_log.ahead_job():
        return prepare(one, device)


def _use(device: torch.device) -> None:
    compile_log.ahead_on_this_thread()
    if device.type == "cuda":
        torch.cuda.set_device(device)


class ParallelCompilation:
    """Compiles `variants` for `device` on threads, from construction on."""

    def __init__(self, variants: list[Variant], device: torch.device) -> None:
        compile_log.install()
        self._began_s = time.monotonic()
        self._known = len(compile_log.compilations())
        workers = max(1, min(len(variants), os.cpu_count() or 1))
        compile_log.begin_ahead(len(variants))
        self._threads = ThreadPoolExecutor(workers, "compile", _use, (device,))
        self._pending: list[Future[Any]] = [
            self._threads.submit(_prepare_ahead, one, device) for one in variants
        ]

    def wait(self) -> None:
        """Block until every kernel can be launched; raises what the compiler raised."""
        try:
            left = [future.result() for future in self._pending]
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
