# SPDX-License-Identifier: Apache-2.0
"""Reference kernels in plain torch, on any device and in any float dtype."""

from vllm.kernels.interface import Kernels


class NaiveKernels(Kernels):
    """`Kernels` by their definitions; fp64 inputs are computed in fp64 throughout.

    Some loop over sequences on the host and read lengths and indices from the device: a reference
    for tests, not a serving path.
    """

    platform = "naive"
