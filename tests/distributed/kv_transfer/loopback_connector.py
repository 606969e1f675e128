# SPDX-License-Identifier: Apache-2.0
"""A connector that is its own peer, for the connector kit: what a request leaves behind is fetched
by the first later request whose prompt begins with it, as a proxy between two engines would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import P2pConnector
from vllm.v1.request import Request


class LoopbackConnector(P2pConnector):
    """Every request's state is kept, its output included."""

    def on_new_request(self, request: Request) -> None:
        stored = vars(self).setdefault("stored", {})
        prompt = request.all_token_ids
        found = (t for t in stored if len(t) < len(prompt) and t == tuple(prompt[: len(t)]))
        if (tokens := next(found, None)) is not None:
            request.kv_transfer_params = stored.pop(tokens)
        super().on_new_request(request)
        self._scheduling._kept.add(request.request_id)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay, params = super().request_finished_all_groups(request, block_ids)
        if params is not None:
            tokens = tuple(request.all_token_ids[: params["remote_num_tokens"]])
            vars(self).setdefault("stored", {})[tokens] = params
        return delay, params


class NixlLoopbackConnector(NixlConnector, LoopbackConnector):
    """The same over NIXL."""


def damage_peer(
    scheduler: KVConnectorBase_V1, worker: KVConnectorBase_V1, storage: Path, damage: str
) -> bool:
    """Spoil all that the engine keeps for its peer, itself."""
    assert isinstance(worker, P2pConnector)
    sender, server = worker._sender, worker._server
    assert sender is not None and server is not None
    if damage == "disconnect":
        server.close()
        return True
    with sender._changed:
        if damage == "drop":
            for req_id in list(sender._held):
                sender._release(req_id, "dropped by a test")
        elif damage == "short":
            for held in sender._held.values():
                held.description["blocks"] = [seals[:-1] for seals in held.description["blocks"]]
        else:
            # Sealed segments alone: nobody can tell what is spoilt before its digest is made.
            for held in sender._held.values():
                first, size = held.description["offset"], held.description["bytes"]
                sender._staging.buffer[first : first + size].bitwise_xor_(1)
    return True
