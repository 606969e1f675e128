# SPDX-License-Identifier: Apache-2.0
"""Whether state passes through device memory or through host memory: `staging_device`.

`auto`: the device, where it can be. `cuda`: the device, or an error. `cpu`: the host.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.kernels.cuda_library import CudaOps
from vllm.platforms import current_platform

KEY = "staging_device"
CHOICES = ("auto", "cuda", "cpu")
DEFAULT = "auto"

_DIGESTS = CudaOps(
    "digests of state in device memory",
    "state in staging memory of the device is sealed there",
    instead_of="on the host, through which the state then passes",
    hopper_only=False,
)


class Choice(NamedTuple):
    """`required`: given as `cuda`, so that host memory will not do."""

    on_device: bool
    why: str
    required: bool = False


def choose(wanted: object, device_type: str) -> Choice:
    """Where an engine on devices of this type stages; `VLLMValidationError` for other values than
    `CHOICES`, and for `cuda` where it cannot be."""
    if wanted not in CHOICES:
        raise _refused(wanted, f"give one of {', '.join(CHOICES)}")
    if wanted == "cpu":
        return Choice(False, f"{KEY} is 'cpu'")
    missing = _missing(device_type)
    if wanted == "auto":
        return Choice(missing is None, missing or "both copies and digests stay on the device")
    if missing is not None:
        raise _refused(wanted, f"{missing}; give 'cpu' or 'auto'")
    return Choice(True, f"{KEY} is 'cuda'", required=True)


def _missing(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"the engine's state is in memory of {device_type}"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            return f"{name} has expandable_segments, whose memory another process cannot open"
    capability = current_platform.get_device_capability()
    if capability is None or not _DIGESTS.choose(capability):
        return "the CUDA ops that make digests do not run here"
    return None


def _refused(value: object, instead: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"state transfer: {KEY} {value!r}: {instead}", parameter=KEY, value=value
    )
