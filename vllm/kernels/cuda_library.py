# SPDX-License-Identifier: Apache-2.0
"""Whether ops of `vllm_cuda` stand in for a library's or Triton's on a device."""

from __future__ import annotations

from vllm import decisions
from vllm._extension import CUDA_LIBRARY, load_cuda_ops

#: the kernels in `csrc/cuda/hopper` hold machine code of this compute capability alone; those in
#: `csrc/cuda` are for it and later ones
HOPPER = (9, 0)


def choose_cuda_ops(
    what: str,
    capability: tuple[int, int],
    *,
    why: str,
    instead_of: str,
    hopper_only: bool,
    chosen: str = "vllm_cuda",
) -> bool:
    """Whether the device of this compute capability runs `what` in the library's ops.

    The choice is recorded: `chosen` and `why`, or `instead_of` and what is missing. The ops are
    loaded if so. `hopper_only`: they are from `csrc/cuda/hopper`.
    """
    missing = None
    if capability < HOPPER or (hopper_only and capability != HOPPER):
        needed = f"{HOPPER}" if hopper_only else f"{HOPPER} or later"
        missing = f"the kernels need compute capability {needed}, this GPU has {capability}"
    elif not CUDA_LIBRARY.exists():
        missing = f"{CUDA_LIBRARY} is not built: see VLLM_TARGET_DEVICE=cuda"
    if missing is not None:
        decisions.record(what, instead_of, missing, instead_of="vllm_cuda")
        return False
    load_cuda_ops()
    decisions.record(what, chosen, why, instead_of)
    return True
