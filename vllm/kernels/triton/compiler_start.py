# SPDX-License-Identifier: Apache-2.0
"""What Triton does once per process before it has a kernel. This module imports nothing heavy."""

import threading
from importlib.util import find_spec

_starting = threading.Lock()


def hash_compiler() -> None:
    """Let Triton compute its hash of itself, which is part of the name of every kernel on disk.

    It reads hundreds of megabytes, outside of Python; threads that need it at once would each do
    so.
    """
    with _starting:
        from triton.runtime.cache import triton_key

        triton_key()


def start_on_a_thread() -> None:
    """Begin with it beside other imports, where there is a CUDA driver and Triton: Triton's own
    import, its functions for the driver, which the host's compiler makes where no cache has them,
    and the hash."""
    if find_spec("triton") is not None:
        threading.Thread(target=_start, name="compiler-start", daemon=True).start()


def _start() -> None:
    with _starting:
        from triton.backends.nvidia.driver import CudaUtils
        from triton.runtime.cache import triton_key

        CudaUtils()
        triton_key()
