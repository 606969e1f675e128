# SPDX-License-Identifier: Apache-2.0
"""Whether ops of `vllm_cuda` stand in for a library's or Triton's on a device."""

from dataclasses import dataclass

import torch

from vllm import decisions
from vllm._extension import CUDA_LIBRARY, load_cuda_ops

#: the kernels in `csrc/cuda/hopper` hold machine code of this compute capability alone; those in
#: `csrc/cuda` are for it and later ones
HOPPER = (9, 0)


@dataclass(frozen=True)
class CudaOps:
    """Ops of the library for one purpose, `what`, and what they stand in for.

    `chosen` and `why`: what the decision says where they run. `hopper_only`: they are from
    `csrc/cuda/hopper`.
    """

    what: str
    why: str
    instead_of: str
    hopper_only: bool = True
    chosen: str = "vllm_cuda"

    def choose(self, capability: tuple[int, int]) -> bool:
        """Whether a device of this compute capability runs them; loads them if so.

        The choice is recorded: `chosen` and `why`, or `instead_of` and what is missing.
        """
        missing = None
        if capability < HOPPER or (self.hopper_only and capability != HOPPER):
            needed = f"{HOPPER}" if self.hopper_only else f"{HOPPER} or later"
            missing = f"the kernels need compute capability {needed}, this GPU has {capability}"
        elif not CUDA_LIBRARY.exists():
            missing = f"{CUDA_LIBRARY} is not built: see VLLM_TARGET_DEVICE=cuda"
        if missing is not None:
            decisions.PROCESS.record(self.what, self.instead_of, missing, instead_of="vllm_cuda")
            return False
        load_cuda_ops()
        decisions.PROCESS.record(self.what, self.chosen, self.why, self.instead_of)
        return True


def overlaps() -> bool:
    """Whether launches may overlap: in a graph, where no kernel writes a weight."""
    return torch.cuda.is_current_stream_capturing()
