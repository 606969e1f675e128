# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, asked before torch is there to do it.

The driver needs half a second to initialise a device. It leaves Python meanwhile, so a thread does
it beside the imports of a process that is going to use the device.
"""

import ctypes
import threading

from vllm import envs

_LIBRARY = "libcuda.so.1"


def initialise_on_a_thread() -> threading.Thread | None:
    """Begin to initialise the first visible device, whose context torch then finds.

    None where VLLM_TARGET_DEVICE forbids it or there is no driver. Whatever else is wrong torch
    says when it uses the device.
    """
    if envs.VLLM_TARGET_DEVICE == "cpu":
        return None
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    thread = threading.Thread(target=_initialise, args=(driver,), name="cuda-driver", daemon=True)
    thread.start()
    return thread


def _initialise(driver: ctypes.CDLL) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
