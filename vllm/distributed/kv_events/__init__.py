# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache holds, told to whoever subscribes: messages and their publisher."""

from vllm.distributed.kv_events.messages import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
)
from vllm.distributed.kv_events.publisher import (
    EventPublisher,
    EventPublisherFactory,
    NullEventPublisher,
    ZmqEventPublisher,
)

__all__ = [
    "MEDIUM_GPU",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEventAggregator",
    "KVEventBatch",
    "NullEventPublisher",
    "ZmqEventPublisher",
]
