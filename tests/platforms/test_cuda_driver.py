# SPDX-License-Identifier: Apache-2.0
"""The driver is asked early, and only where it may be used."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from vllm.platforms import cuda_driver
from vllm.platforms.cuda_driver import initialise_on_a_thread


class Driver:
    """Notes what it is asked; `missing` is what fails."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.asked.append(name)
            return 100 if name == self.missing else 0

        return call


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("missing", "asked"),
    [
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("cuInit", ["cuInit"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
    ],
)
def test_a_thread_makes_the_context(
    monkeypatch: pytest.MonkeyPatch, missing: str, asked: list[str]
) -> None:
    driver = Driver(missing)
    use(monkeypatch, driver)
    thread = initialise_on_a_thread()
    assert thread is not None
    thread.join()
    assert driver.asked == asked


def test_a_process_for_the_cpu_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    use(monkeypatch, driver)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert initialise_on_a_thread() is None and driver.asked == []


def test_a_machine_without_a_driver_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "no-such-library.so")
    assert initialise_on_a_thread() is None


@pytest.mark.gpu
def test_torch_finds_the_context() -> None:
    code = (
        "from vllm.platforms.cuda_driver import initialise_on_a_thread\n"
        "initialise_on_a_thread().join()\n"
        "import ctypes\n"
        "state, active = ctypes.c_uint(), ctypes.c_int()\n"
        "def is_active():\n"
        "    driver = ctypes.CDLL('libcuda.so.1')\n"
        "    driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(state), ctypes.byref(active))\n"
        "    return active.value\n"
        "assert is_active() == 1\n"
        "import torch\n"
        "assert torch.ones(3, device='cuda').sum().item() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
