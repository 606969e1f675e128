# SPDX-License-Identifier: Apache-2.0
"""Publishing of cache events."""

from typing import Literal

from vllm.config.base import config, option


@config
class KVEventsConfig:
    """Where the engine announces stored and removed blocks."""

    enable_kv_cache_events: bool = option(default=False, help="Publish events.")
    publisher: Literal["null", "zmq"] = option(default="null", help="Transport.")
    endpoint: str = option(default="tcp://*:5557", help="Address the publisher binds.")
    replay_endpoint: str | None = option(default=None, help="Address that serves missed events.")
    buffer_steps: int = option(default=10_000, help="Event batches kept for replay.")
    hwm: int = option(default=100_000, help="Messages queued before the publisher drops.")
    max_queue_size: int = option(default=100_000, help="Event batches waiting to be sent.")
    topic: str = option(default="", help="Topic of the messages.")
