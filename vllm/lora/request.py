# SPDX-License-Identifier: Apache-2.0
"""`LoRARequest`: names an adapter. Adapters are not served; using one is an error."""

import msgspec

from vllm.exceptions import VLLMValidationError


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True):
    """An adapter by name, number (>= 1) and path; importable because clients name the type."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")


def check_no_lora(request: LoRARequest | None) -> None:
    """Raise `VLLMValidationError` when a request asks for an adapter."""
    if request is not None:
        raise VLLMValidationError(
            f"LoRA adapters are not supported (adapter {request.lora_name!r}); merge the adapter "
            "into the checkpoint and serve that",
            parameter="lora_request",
            value=request.lora_name,
        )
