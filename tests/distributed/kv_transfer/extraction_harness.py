# SPDX-License-Identifier: Apache-2.0
"""A scheduler and a worker around real connector instances, without an engine.

Every cached row says which request and token it belongs to, so a wrong slot shows as a wrong value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import RequestConflict
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

COLUMNS, HIDDEN = 3, 4
HS_LAYER = "cache_only_layers.2"


def transfer_config(connector: str, role: str = "kv_producer", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)


def extraction_config(
    transfer: KVTransferConfig | None, layers: Sequence[int] = (0, 1, 2)
) -> VllmConfig:
    ids = {"eagle_aux_hidden_state_layer_ids": [*layers]}
    speculative = SpeculativeConfig(
        method="extract_hidden_states",
        num_speculative_tokens=1,
        draft_model_config={"hf_config": ids},
    )
    if transfer is None:
        return VllmConfig()
    # As it is once the model is known.
    speculative.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(**ids))
    return VllmConfig(speculative_config=speculative, kv_transfer_config=transfer)


def cache_config(attention_block_size: int = 16, hs_block_size: int | None = 16) -> KVCacheConfig:
    """One attention group and, unless `hs_block_size` is None, the hidden-state group after it."""
    groups = [
        KVCacheGroupSpec(
            ["layers.0.attn", "layers.1.attn"],
            FullAttentionSpec(
                block_size=attention_block_size, num_kv_heads=2, head_size=4, dtype=torch.float32
            ),
        )
    ]
    if hs_block_size is not None:
        groups.append(KVCacheGroupSpec([HS_LAYER], hs_spec(hs_block_size)))
    return KVCacheConfig(64, [], groups, ArenaPlan(page_bytes=256, num_pages=64, groups=()))


def hs_spec(block_size: int) -> HiddenStateCacheSpec:
    return HiddenStateCacheSpec(
        block_size=block_size, num_kv_heads=COLUMNS, head_size=HIDDEN, dtype=torch.float32
    )


def strided_cache(num_blocks: int, *inner: int, padding: int = 5) -> Tensor:
    """A cache whose blocks do not touch, as in the arena; NaN where nothing was written."""
    size = torch.Size(inner).numel()
    pool = torch.full((num_blocks, size + padding), float("nan"))
    return pool[:, :size].unflatten(1, inner)


def row_values(request_index: int, num_tokens: int) -> Tensor:
    """`[num_tokens, COLUMNS, HIDDEN]`, every element distinct over requests and tokens."""
    per_row = COLUMNS * HIDDEN
    base = torch.arange(num_tokens * per_row, dtype=torch.float32) + 1e5 * (request_index + 1)
    return base.reshape(num_tokens, COLUMNS, HIDDEN)


@dataclass
class Live:
    """A request as the harness sees it."""

    request: Request
    index: int
    block_ids: tuple[list[int], ...]
    scheduled: bool = False
    finished: bool = False


@dataclass
class Harness:
    """Steps a scheduler-side and a worker-side connector in the engine's order."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    num_blocks: int = 64
    live: dict[str, Live] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failed: dict[str, str | RequestConflict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        def make(role: KVConnectorRole) -> KVConnectorBase_V1:
            return KVConnectorFactory.create_connector(self.vllm_config, role, self.kv_cache_config)

        self.scheduler, self.worker = make(KVConnectorRole.SCHEDULER), make(KVConnectorRole.WORKER)
        hs_block_size = self.kv_cache_config.kv_cache_groups[-1].kv_cache_spec.block_size
        self.cache = strided_cache(self.num_blocks, hs_block_size, COLUMNS, HIDDEN)
        self.worker.register_kv_caches({HS_LAYER: self.cache})
        # Block 0 is null; ids are handed out from the top so that they are not in order.
        self.free = [list(range(1, self.num_blocks)) for _ in self.kv_cache_config.kv_cache_groups]

    def add(self, req_id: str, num_prompt: int, kv_params: dict[str, Any] | None = None) -> Request:
        extra = {"kv_transfer_params": kv_params} if kv_params else None
        params = SamplingParams(max_tokens=8, extra_args=extra)
        request = Request(req_id, list(range(100, 100 + num_prompt)), params)
        blocks = tuple([] for _ in self.kv_cache_config.kv_cache_groups)
        self.live[req_id] = Live(request, len(self.live), blocks)
        return request

    def _grow(self, live: Live, num_tokens: int) -> tuple[list[int], ...]:
        """Allocate for `num_tokens`; returns the new blocks per group."""
        new: tuple[list[int], ...] = tuple([] for _ in live.block_ids)
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            while len(live.block_ids[gid]) * group.kv_cache_spec.block_size < num_tokens:
                block = self.free[gid].pop()
                live.block_ids[gid].append(block)
                new[gid].append(block)
        return new

    def _write_rows(self, live: Live, start: int, end: int) -> None:
        block_size = self.cache.shape[1]
        rows = row_values(live.index, end)
        for token in range(start, end):
            block = live.block_ids[-1][token // block_size]
            self.cache[block, token % block_size] = rows[token]

    def step(self, work: dict[str, int] | None = None) -> set[str]:
        """Run `work` (request id -> tokens); returns the requests reported as sent."""
        work = work or {}
        new, cached = [], CachedRequestData()
        for req_id, count in work.items():
            live = self.live[req_id]
            start = live.request.num_computed_tokens
            blocks = self._grow(live, start + count)
            if live.scheduled:
                cached.req_ids.append(req_id)
                cached.new_block_ids.append(blocks)
                cached.num_computed_tokens.append(start)
            else:
                copied = tuple(list(b) for b in live.block_ids)
                new.append(NewRequestData.from_request(live.request, copied))
                live.scheduled = True
            live.request.num_computed_tokens += count
        output = SchedulerOutput(
            new, cached, work, sum(work.values()), finished_req_ids=set(self.finished)
        )
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        self.finished.clear()
        return self._run(output, work)

    def _run(self, output: SchedulerOutput, work: dict[str, int]) -> set[str]:
        metadata = output.kv_connector_metadata
        assert metadata is not None
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(ForwardContext({}, {}))
        for req_id, count in work.items():
            live = self.live[req_id]
            end = live.request.num_computed_tokens
            self._write_rows(live, end - count, end)
        if work:
            worker.wait_for_save()
        sending, _ = worker.get_finished(output.finished_req_ids)
        self.failed.update(worker.take_failed_requests())
        worker.clear_connector_metadata()
        for req_id in sending or ():
            self._release(req_id)
        return sending or set()

    def _release(self, req_id: str) -> None:
        """Blocks go back to the pool, and others write over them at once."""
        live = self.live[req_id]
        for block in live.block_ids[-1]:
            self.cache[block] = float("nan")
        for gid, blocks in enumerate(live.block_ids):
            self.free[gid].extend(blocks)

    def sample(self, req_id: str, token: int) -> None:
        self.live[req_id].request.append_output_token_ids(token)

    def finish(
        self, req_id: str, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> tuple[bool, dict[str, Any] | None]:
        live = self.live[req_id]
        live.request.status = status
        live.finished = True
        self.finished.add(req_id)
        if supports_hma(self.scheduler):
            answer = self.scheduler.request_finished_all_groups(live.request, live.block_ids)
        else:
            answer = self.scheduler.request_finished(live.request, live.block_ids[0])
        if not answer[0]:
            self._release(req_id)
        return answer

    def run_to_end(self, req_id: str, num_prompt: int) -> Path:
        """One request from start to end; returns its path, which a thread may still write to."""
        self.add(req_id, num_prompt)
        self.step({req_id: num_prompt})
        self.sample(req_id, 7)
        keep, params = self.finish(req_id)
        assert keep and params is not None
        assert self.step() == {req_id}
        return Path(params["hidden_states_path"])


def make_harness(path: Path, **options: Any) -> Harness:
    """An `ExampleHiddenStatesConnector` that stores into `path`."""
    sizes = {k: options.pop(k) for k in ("attention_block_size", "hs_block_size") if k in options}
    transfer = transfer_config("ExampleHiddenStatesConnector", shared_storage_path=path, **options)
    return Harness(extraction_config(transfer), cache_config(**sizes))
