# SPDX-License-Identifier: Apache-2.0
"""A sample connector for whole blocks, in this process's memory, and ways to get it wrong."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

BLOCK = 16
#: every byte of a damaged block
DAMAGED = 0x5A


def damage_sample(scheduler: Any, worker: Any, storage: Any, damage: str) -> bool:
    """All that was stored is lost, or overwritten."""
    for name, blocks in list(worker.store.items()):
        worker.store[name] = torch.full_like(blocks, DAMAGED)
    return bool(worker.store)


@dataclass
class Move:
    """The first `num_blocks` blocks of a prompt, on the device and under a name."""

    req_id: str
    name: tuple[int, ...]
    block_ids: list[int]


@dataclass
class SampleMetadata(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)
    extra: Any = None


class SampleConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps whole prompts of attention models by their tokens; loads beside the steps. `fault`, a
    setting, names one of the mistakes marked below."""

    #: directory of the case and rank -> name -> blocks
    stores: ClassVar[dict[tuple[str, int], dict[tuple[int, ...], torch.Tensor]]] = {}

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self.fault = settings.get("fault")
        self.rank = get_tensor_model_parallel_rank()
        self.storage = settings["storage"]
        self.store = self.stores.setdefault((self.storage, self.rank), {})
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.new_loads: dict[str, Move] = {}
        self.new_stores: list[Move] = []
        self.received: set[str] = set()
        self.sent: set[str] = set()
        self.errors: set[tuple[int, int]] = set()

    @property
    def takes_arena(self) -> bool:
        return True

    def register_arena(self, arena: torch.Tensor, plan: Any) -> None:
        self.blocks = arena.view(-1, plan.block_stride(0))

    # ---- scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def _name(self, request: Any) -> tuple[int, ...]:
        return tuple(request.prompt_token_ids[: (request.num_prompt_tokens - 1) // BLOCK * BLOCK])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        name = self._name(request)
        self.prompts[request.request_id] = name
        if (
            self.fault == "nothing-loaded"
            or name not in self.store
            or len(name) <= num_computed_tokens
        ):
            return 0, False
        found = len(name) - num_computed_tokens
        return found + (BLOCK * 4 if self.fault == "matched-too-much" else 0), True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if self.fault == "blocks-leaked":
            self.pool.touch(blocks.blocks[0][:1])
        if num_external:
            name = self.prompts[request.request_id]
            ids = blocks.get_block_ids()[0][: len(name) // BLOCK]
            first = (len(name) - num_external) // BLOCK
            ids = [0] * first + ids[first:]  # what the device had is shared
            self.new_loads[request.request_id] = Move(request.request_id, name, ids)

    def build_connector_meta(self, output: Any) -> SampleMetadata:
        meta = SampleMetadata(list(self.new_loads.values()), self.new_stores)
        self.new_loads.clear()
        self.new_stores = []
        if self.fault == "step-changed":
            output.finished_req_ids = {*output.finished_req_ids, "somebody"}
        if self.fault == "metadata-not-picklable":
            meta.extra = threading.Lock()
        return meta

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        name = self.prompts.pop(request.request_id, ())
        if self.fault == "expects-two-groups":
            _full, _window = block_ids
            return False, None
        if self.fault == "raised":
            raise KeyError("a mistake")
        blocks = block_ids[0][: len(name) // BLOCK]
        if not name or request.num_computed_tokens < len(name) or 0 in blocks:
            return False, None
        self.new_stores.append(Move(request.request_id, name, blocks))
        return True, None

    # ---- worker side

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self.fault == "one-rank-raises" and self.rank:
            raise KeyError("a mistake")
        for move in kv_connector_metadata.stores:
            blocks = self.blocks[move.block_ids].clone()
            if self.fault == "wrong-bits":
                blocks[-1] = 0
            self.store.setdefault(move.name, blocks)
            self.sent.add(move.req_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for move in self._get_connector_metadata().loads:
            blocks = self.store.get(move.name)
            for place, block in enumerate(move.block_ids):
                if blocks is not None and block:
                    self.blocks[block] = blocks[place]
                bad = blocks is None or bool((blocks[place] == DAMAGED).all())
                silent = self.fault == "one-rank-looks" and self.rank
                if bad and not silent and self.fault != "broken-data-decoded":
                    self.errors.add((0, block))
            if self.fault != "never-settles":
                self.received.add(move.req_id)
            if self.errors:
                for (storage, _), store in self.stores.items():
                    if storage == self.storage:  # what one rank lacks none can load
                        store.pop(move.name, None)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = self.sent, self.received
        self.sent, self.received = set(), set()
        if self.fault == "one-rank-reports" and self.rank:
            return None, None
        return (None if self.fault == "never-sent" else sent), received

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        errors, self.errors = self.errors, set()
        return errors

    def wait_for_transfers(self, timeout_s: float) -> None:
        if self.fault == "wait-hangs":
            threading.Event().wait(30)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def shutdown(self) -> None:
        if self.fault == "descriptors-leaked":
            os.open("/dev/null", os.O_RDONLY)
        if self.fault == "threads-leaked":
            threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()


class NextTurnConnector(SampleConnector):
    """Keeps what a request leaves, answer included, for prompts that go on with it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.answered: list[list[int]] = []

    def _name(self, request: Any) -> tuple[int, ...]:
        told = request.prompt_token_ids
        begins = [tokens for tokens in self.answered if told[: len(tokens)] == tokens]
        return self._whole_blocks(max(begins, key=len, default=[]))

    def _whole_blocks(self, tokens: list[int]) -> tuple[int, ...]:
        return tuple(tokens[: (len(tokens) - 1) // BLOCK * BLOCK])

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        tokens = list(request.all_token_ids)
        self.answered.append(tokens)
        self.prompts[request.request_id] = self._whole_blocks(tokens)
        return super().request_finished_all_groups(request, block_ids)
