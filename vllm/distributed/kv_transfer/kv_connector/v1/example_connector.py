# SPDX-License-Identifier: Apache-2.0
"""Keeps prompts' keys and values on disk, to be loaded by the next engine that sees the prompt.

An example to read: transfers are synchronous and whole prompts match or do not. Works for layers
that keep every token (full attention, captured hidden states). Walk-through:
docs/adding_a_connector.md.
"""

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import seal
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import model_identity
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request

_KEY = "kv_cache"
_SEAL = "xxh3_64"


def aligned_length(num_tokens: int, alignment: int) -> int:
    """Tokens of whole blocks that leave at least one token of the prompt to compute."""
    return max(num_tokens - 2, 0) // alignment * alignment


class PrefixStore:
    """Prefixes in `directory`; `scope` is everything besides the tokens that fixes the values.

    Each of `num_ranks` workers stores its own part of a prefix.
    """

    def __init__(self, directory: str, scope: Mapping[str, Any], num_ranks: int = 1) -> None:
        self._directory = directory
        self._num_ranks = num_ranks
        self._scope = json.dumps(scope, sort_keys=True)

    def forget(self) -> None:
        """Find nothing of before, and let no other store find what comes."""
        self._scope = uuid.uuid4().hex

    def folder(self, token_ids: Sequence[int], salt: str | None) -> str:
        """Where the prefix of exactly `token_ids` is or would be stored; see `part`."""
        text = json.dumps([self._scope, salt, list(token_ids)])
        return os.path.join(self._directory, hashlib.sha256(text.encode()).hexdigest())

    def part(self, folder: str, rank: int) -> str:
        """The rank's folder of a prefix."""
        return folder if self._num_ranks == 1 else f"{folder}.{rank}of{self._num_ranks}"

    def has(self, folder: str) -> bool:
        """Whether every rank has stored its part."""
        return all(os.path.isdir(self.part(folder, rank)) for rank in range(self._num_ranks))

    @staticmethod
    def load(folder: str, layer_name: str) -> Tensor:
        """The layer's blocks, `[blocks, ...]` on the CPU; OSError or ValueError if they are not
        what was stored."""
        path = os.path.join(folder, f"{layer_name}.safetensors")
        try:
            with safe_open(path, framework="pt") as file:
                blocks, sealed = file.get_tensor(_KEY), int(file.metadata()[_SEAL], 16)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        seal.check(blocks, sealed, path)
        return blocks

    @staticmethod
    def save(folder: str, layers: dict[str, Tensor]) -> None:
        """Store all layers; the folder appears complete or not at all."""
        if os.path.isdir(folder):
            return
        temporary = f"{folder}.{uuid.uuid4().hex}.partial"
        os.makedirs(temporary)
        try:
            for name, blocks in layers.items():
                path = os.path.join(temporary, f"{name}.safetensors")
                data = blocks.contiguous()
                save_file({_KEY: data}, path, {_SEAL: f"{seal.digest(data):016x}"})
            os.rename(temporary, folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not os.path.isdir(folder):
                raise


logger = init_logger(__name__)


@dataclass
class PrefixTransfer:
    """Blocks of a prefix, per state group, and the folder they go to or come from.

    `first_blocks`: per group, the first block's place in the prefix.
    """

    req_id: str
    folder: str
    block_ids: tuple[list[int], ...]
    first_blocks: tuple[int, ...]


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """One step's transfers."""

    loads: list[PrefixTransfer] = field(default_factory=list)
    stores: list[PrefixTransfer] = field(default_factory=list)


@dataclass(frozen=True)
class _Load:
    """Tokens `start` to `end` of a prompt come from `folder`."""

    folder: str
    start: int
    end: int


@dataclass
class _Prompt:
    """A running request whose prompt is not stored yet."""

    folder: str
    num_tokens: int
    block_ids: tuple[list[int], ...]


class ExampleConnector(KVConnectorBase_V1, SupportsHMA):
    """Settings: `shared_storage_path` (`/tmp`). ValueError for models with other kinds of state."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if kv_cache_config is None:
            raise ValueError("ExampleConnector needs kv_cache_config")
        groups = kv_cache_config.kv_cache_groups
        for group in groups:
            for spec in group.layer_specs.values():
                _check_spec(spec)
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._alignment = math.lcm(*self._block_sizes)
        self._group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        directory = self._kv_transfer_config.get_from_extra_config("shared_storage_path", "/tmp")
        self._store = PrefixStore(
            os.path.abspath(os.fspath(directory)),
            _scope(vllm_config),
            vllm_config.parallel_config.tensor_parallel_size,
        )
        # scheduler side
        self._to_load: dict[str, _Load] = {}
        self._prompts: dict[str, _Prompt] = {}
        # worker side
        self._caches: dict[str, Tensor] = {}
        self._gathered: dict[str, dict[str, Tensor]] = {}
        self._load_errors: set[tuple[int, int]] = set()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    # ---- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = kv_caches

    def will_read_recurrent_state(self, connector_metadata: KVConnectorMetadata) -> bool:
        assert isinstance(connector_metadata, ExampleConnectorMetadata)
        return bool(connector_metadata.stores)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            try:
                self._load(load)
            except (OSError, ValueError, RuntimeError) as error:
                logger.error("request %s: cannot load %s: %s", load.req_id, load.folder, error)
                for group, block_ids in enumerate(load.block_ids):
                    self._load_errors.update((group, block_id) for block_id in block_ids)

    def _load(self, load: PrefixTransfer) -> None:
        for name, cache in self._caches.items():
            ids = self._block_index(load, name, cache)
            first = load.first_blocks[self._group_of[name]]
            blocks = self._store.load(self._part(load.folder), name)[first:]
            if blocks.shape != (len(ids), *cache.shape[1:]) or blocks.dtype != cache.dtype:
                raise ValueError(f"{name}: stored {tuple(blocks.shape)}, {blocks.dtype}: no fit")
            _as_bytes(cache).index_copy_(0, ids, _as_bytes(blocks).to(cache.device))

    def _part(self, folder: str) -> str:
        return self._store.part(folder, get_tensor_model_parallel_rank())

    def _block_index(self, transfer: PrefixTransfer, layer_name: str, cache: Tensor) -> Tensor:
        ids = transfer.block_ids[self._group_of[layer_name]]
        return torch.tensor(ids, dtype=torch.int64, device=cache.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """`start_load_kv` has loaded every layer, in stream order."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        for store in self._metadata().stores:
            ids = self._block_index(store, layer_name, kv_layer)
            layers = self._gathered.setdefault(store.folder, {})
            blocks = _as_bytes(kv_layer).index_select(0, ids)
            layers[layer_name] = blocks.view(kv_layer.dtype)

    def wait_for_save(self) -> None:
        """Write what the layers gathered. Waits for the device in steps that store something."""
        gathered, self._gathered = self._gathered, {}
        for folder, layers in gathered.items():
            try:
                parts = {name: rows.cpu() for name, rows in layers.items()}
                self._store.save(self._part(folder), parts)
            except OSError as error:
                # The prefix is a copy: without it the next request computes its prompt.
                logger.error("cannot store %s: %s", folder, error)

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        errors, self._load_errors = self._load_errors, set()
        return errors

    def _metadata(self) -> ExampleConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        return metadata

    # ---- scheduler side ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        length = aligned_length(len(request.prompt_token_ids), self._alignment)
        if length <= num_computed_tokens or not self._store.has(self._folder(request, length)):
            return 0, False
        return length - num_computed_tokens, False

    def _folder(self, request: Request, length: int) -> str:
        return self._store.folder(request.prompt_token_ids[:length], request.cache_salt)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Remember what to load, and what to store once the prompt is computed."""
        length = aligned_length(len(request.prompt_token_ids), self._alignment)
        folder = self._folder(request, length)
        if num_external_tokens > 0:
            start = length - num_external_tokens
            self._to_load[request.request_id] = _Load(folder, start, length)
        elif length > 0 and not self._store.has(folder):
            empty: tuple[list[int], ...] = tuple([] for _ in self._block_sizes)
            self._prompts[request.request_id] = _Prompt(folder, length, empty)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        meta = ExampleConnectorMetadata()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._add_load(meta, new.req_id, new.block_ids)
            self._add_blocks(new.req_id, new.block_ids, replace=True)
            self._add_store(meta, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            block_ids, resumed = cached.new_block_ids[i], req_id in cached.resumed_req_ids
            if block_ids is not None:
                self._add_load(meta, req_id, block_ids)
                self._add_blocks(req_id, block_ids, resumed)
            self._add_store(meta, req_id, cached.num_computed_tokens[i] + scheduled[req_id])
        return meta

    def _add_load(
        self, meta: ExampleConnectorMetadata, req_id: str, block_ids: tuple[list[int], ...]
    ) -> None:
        load = self._to_load.pop(req_id, None)
        if load is not None:
            transfer = self._transfer(req_id, load.folder, block_ids, load.start, load.end)
            meta.loads.append(transfer)

    def _transfer(
        self, req_id: str, folder: str, block_ids: tuple[list[int], ...], start: int, end: int
    ) -> PrefixTransfer:
        first = tuple(start // size for size in self._block_sizes)
        ids = tuple(
            block_ids[gid][first[gid] : end // size] for gid, size in enumerate(self._block_sizes)
        )
        return PrefixTransfer(req_id, folder, ids, first)

    def _add_blocks(self, req_id: str, block_ids: tuple[list[int], ...], replace: bool) -> None:
        prompt = self._prompts.get(req_id)
        if prompt is None:
            return
        if replace:
            prompt.block_ids = tuple(list(ids) for ids in block_ids)
        else:
            for known, ids in zip(prompt.block_ids, block_ids, strict=True):
                known.extend(ids)

    def _add_store(self, meta: ExampleConnectorMetadata, req_id: str, num_computed: int) -> None:
        """Store a prompt in the step that computes its last aligned token."""
        prompt = self._prompts.get(req_id)
        if prompt is None or num_computed < prompt.num_tokens:
            return
        del self._prompts[req_id]
        transfer = self._transfer(req_id, prompt.folder, prompt.block_ids, 0, prompt.num_tokens)
        meta.stores.append(transfer)

    def reset_cache(self) -> bool | None:
        """What is stored is of the weights of before; prompts on their way are not stored."""
        self._store.forget()
        self._prompts.clear()
        return True

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._to_load.pop(request.request_id, None)
        self._prompts.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


def _as_bytes(blocks: Tensor) -> Tensor:
    """The same memory: torch does not copy blocks of every dtype by their numbers, of float8 none
    on a CPU."""
    return blocks.view(torch.uint8)


def _check_spec(spec: KVCacheSpec) -> None:
    """ValueError for state that is not one row per token of the whole sequence."""
    if spec.is_recurrent:
        raise ValueError(
            "ExampleConnector stores keys and values per token; this model also has recurrent "
            "state, which it cannot store: serve the model without it"
        )
    if spec.keeping_every_token() != spec:
        raise ValueError(
            f"ExampleConnector needs layers that keep every token, got {type(spec).__name__}"
        )


def _scope(vllm_config: VllmConfig) -> dict[str, Any]:
    """What else the stored values depend on."""
    if vllm_config.model_config is None:
        return {"cache_dtype": str(vllm_config.cache_config.cache_dtype)}
    return model_identity(vllm_config)
