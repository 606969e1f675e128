# SPDX-License-Identifier: Apache-2.0
"""Publishing of cache events."""

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import config, option


@config
class KVEventsConfig:
    """Where the engine announces stored and removed blocks."""

    enable_kv_cache_events: bool = option(default=False, help="Publish events.")
    publisher: str | None = option(
        default=None, help="`zmq`, `null` or a registered one; `zmq` when events are enabled."
    )
    endpoint: str = option(default="tcp://*:5557", help="Address the publisher binds.")
    replay_endpoint: str | None = option(default=None, help="Address that serves missed events.")
    buffer_steps: int = option(default=10_000, help="Event batches kept for replay.")
    hwm: int = option(
        default=100_000, help="Messages queued for a subscriber before it loses some; 0: no limit."
    )
    max_queue_size: int = option(default=100_000, help="Event batches waiting to be sent.")
    topic: str = option(default="", help="Topic of the messages.")

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
        for name, least in (("buffer_steps", 1), ("hwm", 0), ("max_queue_size", 1)):
            if getattr(self, name) < least:
                raise VLLMValidationError(
                    f"{name} must be at least {least}", parameter=name, value=getattr(self, name)
                )
