# SPDX-License-Identifier: Apache-2.0
"""What a connector answers, checked: each function returns the answer or raises a TypeError that
names the connector's method, what it returned and what it has to return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.messages import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.engine import RequestError


def matched_tokens(connector: KVConnectorBase_V1, answer: object) -> tuple[int | None, bool]:
    """Of `get_num_new_matched_tokens`."""
    match answer:
        case (int() | None as num_tokens, bool() as runs_beside):
            return num_tokens, runs_beside
    instead = "tokens to load (None: ask again) and whether that runs beside the steps: (0, False)"
    raise _wrong(connector, "get_num_new_matched_tokens", answer, instead)


def metadata(connector: KVConnectorBase_V1, answer: object) -> KVConnectorMetadata:
    """Of `build_connector_meta`."""
    if isinstance(answer, KVConnectorMetadata):
        return answer
    instead = "a KVConnectorMetadata or an object of a class derived from it"
    raise _wrong(connector, "build_connector_meta", answer, instead)


def finished_request(
    connector: KVConnectorBase_V1, method: str, answer: object
) -> tuple[bool, dict[str, Any] | None]:
    """Of `request_finished` or `request_finished_all_groups`, whose name is `method`."""
    match answer:
        case (bool() as keep, dict() | None as params):
            return keep, params
    instead = "whether it keeps the blocks, and a dictionary for the client or None: (False, None)"
    raise _wrong(connector, method, answer, instead)


def finished_transfers(
    connector: KVConnectorBase_V1, answer: object
) -> tuple[set[str] | None, set[str] | None]:
    """Of `get_finished`."""
    match answer:
        case (set() | None as sending, set() | None as recving):
            return sending, recving
    instead = "two sets of request ids, sent and received; None for an empty one: (None, None)"
    raise _wrong(connector, "get_finished", answer, instead)


def blocks(connector: KVConnectorBase_V1, answer: object) -> set[tuple[int, int]]:
    """Of `get_blocks_with_load_errors`."""
    if isinstance(answer, set) and all(map(_is_block, answer)):
        return answer
    instead = "a set of pairs (state group, block)"
    raise _wrong(connector, "get_blocks_with_load_errors", answer, instead)


def _is_block(answer: object) -> bool:
    match answer:
        case (int(), int()):
            return True
    return False


def block_ids(connector: KVConnectorBase_V1, answer: object) -> set[int]:
    """Of `get_block_ids_with_load_errors`."""
    if isinstance(answer, set) and all(isinstance(one, int) for one in answer):
        return answer
    raise _wrong(connector, "get_block_ids_with_load_errors", answer, "a set of block ids")


def failed_requests(connector: KVConnectorBase_V1, answer: object) -> dict[str, RequestError]:
    """Of `take_failed_requests`."""
    if isinstance(answer, dict):
        return answer
    instead = "a dictionary from request id to reason, empty if all goes well"
    raise _wrong(connector, "take_failed_requests", answer, instead)


def stats(connector: KVConnectorBase_V1, answer: object) -> KVConnectorStats | None:
    """Of `get_kv_connector_stats`."""
    if answer is None or isinstance(answer, KVConnectorStats):
        return answer
    instead = "None or an object of a class derived from KVConnectorStats, such as CounterStats"
    raise _wrong(connector, "get_kv_connector_stats", answer, instead)


def worker_meta(connector: KVConnectorBase_V1, answer: object) -> KVConnectorWorkerMetadata | None:
    """Of `build_connector_worker_meta`."""
    if answer is None or isinstance(answer, KVConnectorWorkerMetadata):
        return answer
    instead = "None or an object of a class derived from KVConnectorWorkerMetadata"
    raise _wrong(connector, "build_connector_worker_meta", answer, instead)


def _wrong(connector: KVConnectorBase_V1, method: str, answer: object, instead: str) -> TypeError:
    name = f"{type(connector).__name__}.{method}"
    return TypeError(f"{name} returned {answer!r}; it has to return {instead}")
