# SPDX-License-Identifier: Apache-2.0
"""`ExampleConnector`: prompts stored by one engine are loaded by the next, block for block."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.kv_transfer.extraction_harness import (
    COLUMNS,
    HIDDEN,
    HS_LAYER,
    cache_config,
    strided_cache,
    transfer_config,
)
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    PrefixStore,
    aligned_length,
)
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

ATTENTION = ("layers.0.attn", "layers.1.attn")


@dataclass
class Engine:
    """Both sides of a connector and the caches they see."""

    scheduler: Any
    worker: Any
    caches: dict[str, Tensor]

    @classmethod
    def start(
        cls, path: Path, kv_config: KVCacheConfig, dtype: torch.dtype = torch.float32
    ) -> Engine:
        """`dtype`: of keys and values."""
        transfer = transfer_config("ExampleConnector", role="kv_both", shared_storage_path=path)
        config = VllmConfig(kv_transfer_config=transfer)
        sides = [
            KVConnectorFactory.create_connector(config, role, kv_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        ]
        size = kv_config.kv_cache_groups[0].kv_cache_spec.block_size
        caches = {name: strided_cache(40, 2, size, 2, 4).to(dtype) for name in ATTENTION}
        if len(kv_config.kv_cache_groups) > 1:
            hs_size = kv_config.kv_cache_groups[1].kv_cache_spec.block_size
            caches[HS_LAYER] = strided_cache(40, hs_size, COLUMNS, HIDDEN)
        sides[1].register_kv_caches(caches)
        return cls(sides[0], sides[1], caches)

    def step(self, output: SchedulerOutput) -> set[tuple[int, int]]:
        """The worker's step; layers write nothing of their own. Returns load errors."""
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.start_load_kv(ForwardContext({}, {}))
        for name, cache in self.caches.items():
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, cache, AttentionMetadata())
        self.worker.wait_for_save()
        errors = self.worker.get_blocks_with_load_errors()
        self.worker.clear_connector_metadata()
        return errors


def prompt(num_tokens: int, salt: str | None = None, first: int = 0) -> Request:
    return Request("r", list(range(first, first + num_tokens)), None, cache_salt=salt)


def new_step(request: Request, blocks: tuple[list[int], ...], computed: int) -> SchedulerOutput:
    new = NewRequestData.from_request(request, blocks)
    new.num_computed_tokens = computed
    scheduled = {request.request_id: request.num_tokens - computed}
    return SchedulerOutput([new], CachedRequestData(), scheduled, sum(scheduled.values()))


def store(engine: Engine, request: Request, blocks: tuple[list[int], ...]) -> None:
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.scheduler.update_state_after_alloc(request, None, 0)
    for cache in engine.caches.values():
        cache.copy_(torch.randn(cache.shape))
    assert engine.step(new_step(request, blocks, 0)) == set()


@pytest.mark.parametrize("n, expected", [(0, 0), (1, 0), (16, 0), (17, 0), (18, 16), (34, 32)])
def test_aligned_length(n: int, expected: int) -> None:
    assert aligned_length(n, 16) == expected


@pytest.mark.parametrize(
    ("hs_block_size", "dtype"),
    [(None, torch.float32), (16, torch.float32), (4, torch.float32), (16, torch.float8_e4m3fn)],
)
def test_another_engine_loads_the_same_bits(
    tmp_path: Path, hs_block_size: int | None, dtype: torch.dtype
) -> None:
    kv_config = cache_config(16, hs_block_size)
    first = Engine.start(tmp_path, kv_config, dtype)
    groups: list[list[int]] = [[5, 3, 9]]
    others: list[list[int]] = [[1, 2, 30]]
    if hs_block_size is not None:
        per_block = 16 // hs_block_size
        groups.append(list(range(20, 20 + 3 * per_block)))
        others.append(list(range(1, 1 + 3 * per_block)))
    store(first, prompt(40), tuple(groups))
    assert sorted(p.name for p in next(tmp_path.iterdir()).iterdir()) == sorted(
        f"{name}.safetensors" for name in first.caches
    )

    second = Engine.start(tmp_path, kv_config, dtype)
    request = prompt(40)
    assert second.scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    second.scheduler.update_state_after_alloc(request, None, 32)
    assert second.step(new_step(request, tuple(others), 32)) == set()
    for name, kept in second.caches.items():
        cache = kept.float()  # exact
        gid = 0 if name in ATTENTION else 1
        blocks = 32 // cache.shape[2 if gid == 0 else 1]
        expected = first.caches[name][groups[gid][:blocks]].float()
        assert torch.equal(cache[others[gid][:blocks]], expected)
        untouched = [b for b in range(40) if b not in others[gid][:blocks]]
        assert cache[untouched].isnan().all()


def test_blocks_already_cached_are_not_overwritten(tmp_path: Path) -> None:
    """They may be shared with running requests."""
    kv_config = cache_config(16, None)
    store(Engine.start(tmp_path, kv_config), prompt(60), ([1, 2, 3, 4],))
    engine = Engine.start(tmp_path, kv_config)
    request = prompt(60)
    assert engine.scheduler.get_num_new_matched_tokens(request, 16) == (32, False)
    assert engine.scheduler.get_num_new_matched_tokens(request, 48) == (0, False)
    engine.scheduler.update_state_after_alloc(request, None, 32)
    engine.step(new_step(request, ([1, 2, 3, 4],), 48))
    for cache in engine.caches.values():
        assert cache[1].isnan().all() and cache[4].isnan().all()
        assert not cache[[2, 3]].isnan().any()


def test_chunked_prompt_is_stored_when_complete(tmp_path: Path) -> None:
    engine = Engine.start(tmp_path, cache_config(16, None))
    request = prompt(40)
    engine.scheduler.update_state_after_alloc(request, None, 0)
    for cache in engine.caches.values():
        cache.copy_(torch.randn(cache.shape))
    first = new_step(request, ([7],), 0)
    first.num_scheduled_tokens = {"r": 16}
    engine.step(first)
    assert not list(tmp_path.iterdir())
    reads = engine.worker.will_read_recurrent_state
    assert not reads(first.kv_connector_metadata)
    cached = CachedRequestData(req_ids=["r"], new_block_ids=[([8, 9],)], num_computed_tokens=[16])
    second = SchedulerOutput([], cached, {"r": 24}, 24)
    engine.step(second)
    assert reads(second.kv_connector_metadata)
    [folder] = tmp_path.iterdir()
    for name, cache in engine.caches.items():
        assert torch.equal(PrefixStore.load(str(folder), name), cache[[7, 8]])


def test_preempted_prompt_is_stored_from_its_new_blocks(tmp_path: Path) -> None:
    engine = Engine.start(tmp_path, cache_config(16, None))
    request = prompt(40)
    engine.scheduler.update_state_after_alloc(request, None, 0)
    first = new_step(request, ([7],), 0)
    first.num_scheduled_tokens = {"r": 16}
    engine.step(first)
    engine.scheduler.update_state_after_alloc(request, None, 0)
    for cache in engine.caches.values():
        cache.copy_(torch.randn(cache.shape))
    resumed = CachedRequestData(
        req_ids=["r"],
        resumed_req_ids={"r"},
        new_block_ids=[([11, 12, 13],)],
        num_computed_tokens=[0],
    )
    engine.step(SchedulerOutput([], resumed, {"r": 40}, 40))
    [folder] = tmp_path.iterdir()
    stored = PrefixStore.load(str(folder), ATTENTION[0])
    assert torch.equal(stored, engine.caches[ATTENTION[0]][[11, 12]])


def test_other_prompts_and_salts_do_not_match(tmp_path: Path) -> None:
    kv_config = cache_config(16, None)
    store(Engine.start(tmp_path, kv_config), prompt(40, salt="a"), ([1, 2, 3],))
    scheduler = Engine.start(tmp_path, kv_config).scheduler
    assert scheduler.get_num_new_matched_tokens(prompt(40, salt="a"), 0) == (32, False)
    assert scheduler.get_num_new_matched_tokens(prompt(49, salt="a"), 0) == (32, False)
    assert scheduler.get_num_new_matched_tokens(prompt(40), 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(prompt(40, "a", first=1), 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(prompt(30, "a"), 0) == (0, False)


def test_damaged_file_is_reported_as_load_error(tmp_path: Path) -> None:
    kv_config = cache_config(16, None)
    store(Engine.start(tmp_path, kv_config), prompt(40), ([1, 2, 3],))
    [folder] = tmp_path.iterdir()
    (folder / f"{ATTENTION[1]}.safetensors").write_bytes(b"nothing")
    engine = Engine.start(tmp_path, kv_config)
    request = prompt(40)
    engine.scheduler.update_state_after_alloc(request, None, 32)
    assert engine.step(new_step(request, ([4, 5, 6],), 32)) == {(0, 4), (0, 5)}
    assert engine.worker.get_blocks_with_load_errors() == set()


def test_after_a_reset_old_and_new_state_are_apart(tmp_path: Path) -> None:
    """The weights may be others: the engine finds nothing of before, and its next start, with the
    checkpoint's weights again, nothing of after."""
    engine = Engine.start(tmp_path, cache_config(16, None))
    store(engine, prompt(40), ([1, 2, 3],))
    on_its_way = prompt(60, first=100)
    engine.scheduler.update_state_after_alloc(on_its_way, None, 0)
    assert engine.scheduler.reset_cache()
    engine.step(new_step(on_its_way, ([1, 2, 3, 4],), 0))
    store(engine, prompt(40), ([1, 2, 3],))
    store(engine, prompt(50, first=200), ([1, 2, 3, 4],))
    assert engine.scheduler.get_num_new_matched_tokens(prompt(40), 0) == (32, False)
    again = Engine.start(tmp_path, cache_config(16, None)).scheduler
    for request, found in ((prompt(40), 32), (prompt(50, first=200), 0), (on_its_way, 0)):
        assert again.get_num_new_matched_tokens(request, 0) == (found, False)


def test_store_failure_does_not_stop_the_step(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.write_text("")
    engine = Engine.start(storage, cache_config(16, None))
    store(engine, prompt(40), ([1, 2, 3],))
    assert storage.is_file()


def test_prefix_is_stored_once_and_whole(tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    PrefixStore.save(folder, {"a": torch.ones(2)})
    PrefixStore.save(folder, {"a": torch.zeros(2)})
    assert PrefixStore.load(folder, "a").tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    shutil.rmtree(folder)
    assert not PrefixStore(str(tmp_path), {}).has(folder)
    ranks = PrefixStore(str(tmp_path), {}, num_ranks=2)
    for rank in range(2):
        assert not ranks.has(folder), "a part is missing"
        PrefixStore.save(ranks.part(folder, rank), {"a": torch.ones(2)})
    assert ranks.has(folder)


def test_finished_requests_are_forgotten(tmp_path: Path) -> None:
    engine = Engine.start(tmp_path, cache_config(16, None))
    request = prompt(40)
    engine.scheduler.update_state_after_alloc(request, None, 0)
    assert engine.scheduler.request_finished_all_groups(request, ([1],)) == (False, None)
    assert engine.scheduler._prompts == {}


@pytest.mark.parametrize(
    "spec, reason",
    [
        (MambaSpec(16, ((2, 3),), (torch.float32,)), "recurrent state"),
        (
            SlidingWindowSpec(
                block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=8
            ),
            "keep every token",
        ),
    ],
)
def test_state_it_cannot_store(tmp_path: Path, spec: Any, reason: str) -> None:
    kv_config = cache_config(16, None)
    kv_config.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec))
    with pytest.raises(ValueError, match=reason):
        Engine.start(tmp_path, kv_config)
