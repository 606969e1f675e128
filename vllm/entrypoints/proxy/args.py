# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm proxy`."""

from typing import Annotated

from pydantic import Field, PositiveInt

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option


@config
class ProxyArgs:
    """Where the engines are, and how they are watched."""

    prefill: list[str] = option(
        default_factory=list, help="URLs of servers that compute prompts (kv_producer or kv_both)."
    )
    decode: list[str] = option(
        default_factory=list, help="URLs of servers that answer (kv_consumer or kv_both)."
    )
    host: str = option(default="127.0.0.1", help="Address to listen at.")
    port: Annotated[int, Field(ge=0, le=65535)] = option(default=8000, help="Port to listen at.")
    health_interval: float = option(
        default=1.0, help="Seconds between two looks at every server's /health."
    )
    health_timeout: float = option(
        default=5.0, help="Seconds after which a server that does not answer /health is left out."
    )
    prefill_timeout: float = option(
        default=120.0, help="Seconds that a prompt may take before another server is tried."
    )

    max_request_body_size: PositiveInt = option(
        default=64 * 2**20,
        kind=FlagKind.HUMAN_INT,
        help="Largest request body in bytes; larger ones get status 413.",
    )

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            urls: list[str] = getattr(self, name)
            if not urls:
                raise VLLMValidationError(f"--{name} needs at least one URL", name)
            for url in urls:
                if not url.startswith(("http://", "https://")):
                    raise VLLMValidationError(f"--{name} {url}: a URL begins with http://", name)
        for name in ("health_interval", "health_timeout", "prefill_timeout"):
            if not getattr(self, name) > 0:
                flag = name.replace("_", "-")
                raise VLLMValidationError(f"--{flag} must be a positive number of seconds", name)
