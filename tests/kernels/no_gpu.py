# SPDX-License-Identifier: Apache-2.0
"""Makes Triton compile for an H100 on a machine without a GPU. Launching is not possible.

For scripts in processes of their own, with TRITON_INTERPRET unset: importing this is enough.
"""

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class NoDevice:
    """What Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


driver.set_active(NoDevice())
