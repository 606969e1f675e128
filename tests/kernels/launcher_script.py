# SPDX-License-Identifier: Apache-2.0
"""Launches kernels twice through a `Launcher` and once by Triton, on a driver that only notes which
compiled kernel is given what. Prints JSON."""

import json
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from tests.kernels import no_gpu
from vllm.kernels.triton.compile_ahead import noted_launches
from vllm.kernels.triton.launcher import Launcher

#: the loaded kernel of each launch, and its grid, stream and arguments
noted: list[tuple[Any, list[Any]]] = []


class Note:
    """In place of the function that makes a launch."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.pointers = [i for i, kind in enumerate(src.signature.values()) if kind[0] == "*"]

    def __call__(self, x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
        args = list(rest[4:])
        for i in self.pointers:
            if isinstance(args[i], torch.Tensor):
                args[i] = args[i].data_ptr()
        noted.append((function, [x, y, z, stream, *map(repr, args)]))


class NotingDriver(no_gpu.NoDevice):
    launcher_cls = Note
    device = 0
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        load_binary=lambda *_: (object(), object(), 0, 0, 1024),
    )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 40 + device


driver.set_active(NotingDriver())


@triton.jit(do_not_specialize=["rows"])
def scaled(x, y, bias, rows, stride, scale, flag, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Compiled anew for each kind of argument, whatever it does."""


@triton.jit
def plain(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 0.0)


@triton.jit
def constant_first(BLOCK: tl.constexpr, x):
    tl.store(x + tl.arange(0, BLOCK), 0.0)


def cases() -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """`(kernel, grid, arguments, constants)`: pairs of calls that differ in one respect."""
    buffer = torch.zeros(256)
    options = {"WIDE": False, "BLOCK": 32}

    def call(*args: Any, grid: tuple[int, ...] = (1,), **constants: Any) -> Any:
        return scaled, grid, args, options | constants

    base = (buffer, buffer[4:], None, 5, 8, 0.5, True)
    found = [call(*base), call(*base, grid=(2, 3)), (plain, (1,), (buffer,), {"BLOCK": 8})]
    found += [call(*base, **change) for change in (
        {"WIDE": True}, {"BLOCK": 64}, {"num_warps": 2}, {"num_stages": 2}
    )]  # fmt: skip
    changes: list[tuple[int, Any]] = [
        *product((0, 1, 2), (buffer[1:], buffer[4:], buffer.half(), torch.nn.Parameter(buffer))),
        *product((3,), (1, 16, 17, 2**31 - 1, 2**31, -(2**31) - 1)),
        *product((4,), (1, 16, 17, 2**31, 2**31 + 1, True, 1.0)),
        *product((5,), (1.0, 1)),
        *product((6,), (False, 1)),
    ]
    for place, value in changes:
        args = list(base)
        args[place] = value
        found.append(call(*args))
    return found


def _count_hooks() -> list[str]:
    """The kernels that Triton asks its hook about, from now on in this block."""
    hook: Any = knobs.runtime.jit_cache_hook
    asked: list[str] = []

    def counted(**what: Any) -> bool:
        asked.append(what["fn"].name)
        return bool(hook(**what))

    knobs.runtime.jit_cache_hook = counted
    return asked


def main() -> None:
    launchers = {scaled: Launcher(scaled), plain: Launcher(plain)}
    different = []
    for attempt in range(2):
        for kernel, grid, args, constants in cases():
            noted.clear()
            launchers[kernel][grid](*args, **constants)
            kernel[grid](*args, **constants)
            ours, tritons = noted
            if ours[0] is not tritons[0] or ours[1] != tritons[1]:
                different.append([attempt, repr(args), repr(constants), ours[1], tritons[1]])
    variants = len(scaled.device_caches[0][0])
    buffer = torch.zeros(64)
    NotingDriver.device = 1
    noted.clear()
    for _ in range(2):
        launchers[plain][(1,)](buffer, BLOCK=8)
        plain[(1,)](buffer, BLOCK=8)
    kernels = {id(function) for function, _ in noted}
    with noted_launches() as waiting:
        asked = _count_hooks()
        for _ in range(3):
            launchers[plain][(1,)](buffer.half(), BLOCK=8)
            launchers[plain][(1,)](buffer.double(), BLOCK=8)
    with noted_launches() as waiting_again:
        launchers[plain][(1,)](buffer.half(), BLOCK=8)
    launchers[plain][(1,)](buffer.half(), BLOCK=8)
    errors = []
    try:
        Launcher(constant_first)
    except ValueError as error:
        errors.append(str(error))
    result = {
        "different": different,
        "variants": variants,
        "kernels of the other device": len(kernels),
        "streams": [launch[1][3] for launch in noted],
        "waiting": [one.kernel for one in waiting],
        "waiting again": [one.kernel for one in waiting_again],
        "asked": asked,
        "errors": errors,
    }
    json.dump(result, sys.stdout)


main()
