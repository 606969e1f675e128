# SPDX-License-Identifier: Apache-2.0
"""Environment variables of NCCL and of torch's use of it."""

from __future__ import annotations

from collections.abc import MutableMapping

from vllm import decisions
from vllm.exceptions import VLLMValidationError

#: makes a collective wait on the host: steps would, and no graph could be captured
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_MULTICAST = "NCCL_NVLS_ENABLE"


def prepare_nccl(environment: MutableMapping[str, str]) -> None:
    """Set what the user has not, before the first communicator.

    Raises `VLLMValidationError` for a variable that makes collectives wait on the host.
    """
    for name in _BLOCKING:
        if environment.get(name, "0").strip().lower() not in ("", "0", "false", "n", "no"):
            raise VLLMValidationError(
                f"{name}={environment[name]} makes the host wait in every collective, so steps "
                "over several GPUs can be neither asynchronous nor graphs; unset it",
                name,
            )
    if _MULTICAST not in environment:
        environment[_MULTICAST] = "0"
        decisions.record(
            "NVLink multicast",
            "off",
            "a program that ends badly while it uses multicast can leave the GPUs of the host "
            f"unusable; {_MULTICAST}=1 turns it on",
        )
