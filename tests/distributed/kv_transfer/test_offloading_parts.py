# SPDX-License-Identifier: Apache-2.0
"""Settings, flags, seals, tiers and memory forms of offloading, without an engine."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from tests.distributed.kv_transfer.toy_connectors import HybridConnector, plain
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import seal
from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import runs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, StateMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import (
    FileStore,
    file_name,
    parse_name,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import OffloadingStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.settings import OffloadingSettings
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier, _Both
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.explain import Budget, explain
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    Tail,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.worker.arena import Arena

FP32 = torch.float32
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype=FP32)
STATE = MambaSpec(16, ((3, 8), (2, 4, 4)), (FP32, FP32))


def cache_of(*specs: Any, num_pages: int = 5) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"{g}.a", f"{g}.b"], spec) for g, spec in enumerate(specs)]
    return KVCacheConfig(num_pages, [], groups, plan_arena(groups, num_pages))


# ---- what a connector gets ---------------------------------------------------------------------


class Asking(HybridConnector):
    """Takes what the class attributes say."""

    arena = cross = False
    got: tuple[str, Any]

    @property
    def takes_arena(self) -> bool:
        return self.arena

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return self.cross

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.got = "layers", kv_caches

    def register_arena(self, arena: Tensor, plan: Any) -> None:
        self.got = "arena", arena

    def register_cross_layers_kv_cache(self, kv_cache: Tensor, attn_backend: Any) -> None:
        self.got = "cross", kv_cache


def memory_of(config: KVCacheConfig) -> StateMemory:
    arena = Arena(config, torch.device("cpu"))
    cross = arena.cross_layers(config.kv_cache_groups[0])
    layers: Any = arena.layers
    return StateMemory(arena.buffer, arena.plan, layers, None if cross is None else (cross, object))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arena", "cross", "specs", "form"),
    [
        (False, False, (ATTENTION,), "layers"),
        (True, True, (ATTENTION, STATE), "arena"),
        (False, True, (ATTENTION,), "cross"),
        (False, True, (ATTENTION, STATE), "layers"),
        (False, True, (STATE,), "layers"),
    ],
)
def test_each_connector_gets_the_form_it_asks_for(
    arena: bool, cross: bool, specs: tuple[Any, ...], form: str
) -> None:
    connector = Asking(VllmConfig(kv_transfer_config=plain()), KVConnectorRole.WORKER, None)
    connector.arena, connector.cross = arena, cross
    connector.register_memory(memory_of(cache_of(*specs)))
    assert connector.got[0] == form


def test_a_cross_layer_view_is_the_same_memory() -> None:
    memory = memory_of(cache_of(ATTENTION))
    assert memory.cross_layers is not None
    view = memory.cross_layers[0]
    assert view.shape == (5, 2, 2, 16, 2, 4)
    for layer, name in enumerate(("0.a", "0.b")):
        memory.layers[name][3] = layer + 1.0
        assert (view[3, layer] == layer + 1).all()
    block = memory.arena.view(torch.float32).view(5, -1)[3]
    assert torch.equal(view[3].reshape(-1), block)


# ---- flags and settings ------------------------------------------------------------------------


def test_flags_become_a_connector_before_its_capability_counts() -> None:
    args = EngineArgs(str(tiny_model("qwen3_5")), kv_offloading_size=0.5)
    config = args.create_engine_config()
    transfer = config.kv_transfer_config
    assert transfer is not None and transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_role == "kv_both" and transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use": 2**29}
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    names = [decision.what for decision in config.decisions.decisions()]
    assert "kv connector" in names and "kv_load_failure_policy" in names


def test_the_lmcache_backend_needs_its_package() -> None:
    args = EngineArgs(
        str(tiny_model("llama")), kv_offloading_size=1, kv_offloading_backend="lmcache"
    )
    with pytest.raises(ImportError, match="LMCacheMPConnector.*lmcache"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "cpu_bytes_to_use None: give a positive number"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use 0"),
        ({"cpu_bytes_to_use": 9, "eviction_policy": "fifo"}, "'fifo': choose one of lru, arc"),
        ({"cpu_bytes_to_use": 9, "eviction_policy": ["arc"]}, "choose one of lru, arc"),
        ({"cpu_bytes_to_use": 9, "store_threshold": 2}, "store_threshold 2.*knows cpu_bytes"),
        ({"cpu_bytes_to_use": 9, "spec_name": "Mine"}, "choose one of CPUOffloadingSpec"),
        ({"cpu_bytes_to_use": 9, "secondary_tiers": [{"type": "obj"}]}, "the only type is 'fs'"),
        ({"cpu_bytes_to_use": 9, "secondary_tiers": [{"type": "fs"}]}, "name a directory"),
        ({"cpu_bytes_to_use": 9, "secondary_tiers": [{}, {}]}, "at most one tier"),
        ({"cpu_bytes_to_use": 9, "secondary_tiers": ["a"]}, "give an object: type, root_dir"),
    ],
)
def test_refused_settings(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        OffloadingSettings.of(extra)


def test_a_tier_without_a_page_is_refused() -> None:
    plan = cache_of(ATTENTION).plan
    settings = OffloadingSettings.of({"cpu_bytes_to_use": plan.page_bytes * 2 - 1})
    assert settings.host_pages(plan, 1) == 1
    least = f"at least {2 * plan.page_bytes} bytes .--kv-offloading-size"
    with pytest.raises(VLLMValidationError, match=least):
        settings.host_pages(plan, 2)
    tier = {"type": "fs", "root_dir": "a", "max_bytes": plan.page_bytes - 1}
    settings = OffloadingSettings.of({"cpu_bytes_to_use": 1, "secondary_tiers": [tier]})
    with pytest.raises(VLLMValidationError, match=r"secondary_tiers\[0\].max_bytes .* at least"):
        settings.file_pages(plan, 1)


def test_a_directory_that_cannot_be_made_is_named() -> None:
    with pytest.raises(VLLMValidationError, match=r"root_dir '/proc/none': cannot be made \(No"):
        FileStore("/proc/none", {"model": "a"}, rank=0)


def test_explain_shows_the_tiers(tmp_path: Path) -> None:
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 2_000_000,
            "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path), "max_bytes": 4_000_000}],
        },
    }
    args = EngineArgs(
        str(tiny_model("qwen3_5")), max_model_len=256, kv_transfer_config=transfer, dtype="float32"
    )
    report = explain(args.create_engine_config(), Budget(1_000_000), what_ifs=False)
    assert [tier.name for tier in report.tiers] == ["host memory", "files"]
    for tier, num_bytes in zip(report.tiers, (2_000_000, 4_000_000), strict=True):
        assert tier.num_pages == num_bytes // report.page_bytes
        assert tier.num_bytes == tier.num_pages * report.page_bytes
    assert report.tiers[1].capacity_tokens > report.tiers[0].capacity_tokens > 0


# ---- seals, files, tiers -----------------------------------------------------------------------


def test_a_seal_finds_any_flipped_bit() -> None:
    data = torch.arange(1000, dtype=torch.float32)
    sealed = seal.digest(data)
    seal.check(data, sealed, "here")
    assert seal.digest(data.numpy().view(np.uint8)) == sealed
    for byte in (0, 1999, 3999):
        broken = data.clone()
        broken.view(torch.uint8)[byte] ^= 4
        with pytest.raises(seal.SealBroken, match=f"here: sealed with digest {sealed:016x}"):
            seal.check(broken, sealed, "here")


def test_other_threads_run_while_a_seal_is_made() -> None:
    """A thread that holds Python's lock, and gives it to nobody, sees another one compute."""
    data = np.zeros(2**28, np.uint8)  # of one page of memory
    seen, interval = threading.Event(), sys.getswitchinterval()

    def make() -> None:
        for _ in range(200):
            seal.digest(data)
            if seen.is_set():
                return
        seen.wait()  # whoever watches this thread's clock needs it alive

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        computed = any(_advances(clock) for _ in range(50))
    finally:
        sys.setswitchinterval(interval)
        seen.set()
        thread.join()
    assert computed, "no digest went on while another thread had Python's lock"


def _advances(clock: int) -> bool:
    """Whether a thread's clock goes on by a millisecond while this one computes for fifty."""
    time.sleep(0.01)  # in which it may have the lock
    began, until = time.clock_gettime(clock), time.thread_time() + 0.05
    while time.thread_time() < until:
        if time.clock_gettime(clock) > began + 0.001:
            return True
    return False


@pytest.mark.parametrize("sizes", [[], [5], [3, 3, 3, 3, 3], [50, 1, 1, 1, 60], [1] * 100])
def test_shares_are_balanced(sizes: list[int]) -> None:
    parts = seal.balanced(sizes, 4)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert all(len(p) == 1 or sum(sizes[i] for i in p) <= -(-sum(sizes) // 4) for p in parts)
    assert len(parts) <= 8


@pytest.mark.parametrize("size", [1, 240, 241, 1024, 1025, 1088, 5000, 2**20 + 3])
def test_digests_are_those_of_the_library(size: int) -> None:
    """Of parts that begin anywhere; as the library's, side by side, in order."""
    data = torch.randint(256, (3 * size + 7,), dtype=torch.uint8)
    spans = [(0, size), (7, size), (2 * size + 1, size), (3 * size + 7 - size, size)]
    expected = [xxhash.xxh3_64_intdigest(data[a : a + n].numpy()) for a, n in spans]
    assert seal.digests(data, spans) == expected
    sealer = seal.Sealer("test")
    assert sealer.digests(data, spans) == expected
    assert sealer.digests(data, []) == seal.digests(data, []) == []
    sealer.close()


def test_digests_do_not_read_beyond() -> None:
    data = torch.zeros(1000, dtype=torch.uint8)
    for span in ((0, 1001), (500, 501), (-1, 300), (2**62, 2**62)):
        with pytest.raises(RuntimeError, match="are not in data of 1000"):
            seal.digests(data, [(0, 300), span])
    with pytest.raises(RuntimeError, match="data must be uint8"):
        seal.digests(data.float(), [(0, 300)])


def key(number: int, group: int = 0) -> Any:
    return make_block_hash_with_group_id(BlockHash(number.to_bytes(32, "big")), group)


def test_names_of_files_say_what_is_in_them() -> None:
    tail = Tail(key(7, 1), key(6, 1), 5)
    for one in ((key(3, 2), None), (tail.key, tail)):
        assert parse_name(file_name(*one)) == one
    for wrong in ("x", "g1-zz", "g1-00-00", "h1-00"):
        with pytest.raises(ValueError):
            parse_name(wrong)


def test_files_are_whole_sealed_and_of_one_identity(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), {"model": "a"}, rank=0)
    data = np.arange(64, dtype=np.uint8)
    store.write("g0-00ff", data, 123)
    target = np.zeros_like(data)
    assert store.read("g0-00ff", target) == 123 and (target == data).all()
    partial = Path(store.path("g0-00ff") + ".1.partial")
    partial.write_text("what a killed writer left")
    assert list(store.names()) == ["g0-00ff"] and not partial.exists()
    with pytest.raises(seal.SealBroken, match="not a block of 32 bytes"):
        store.read("g0-00ff", target[:32])
    Path(store.path("g0-00ee")).parent.mkdir(exist_ok=True)
    for damaged in (b"", b"x" * 24, b"x" * 23):
        Path(store.path("g0-00ee")).write_bytes(damaged)
        with pytest.raises(seal.SealBroken):
            store.read("g0-00ee", target)
    store.delete("g0-00ee")
    again, other = (FileStore(str(tmp_path), {"model": name}, rank=0) for name in "ab")
    assert again.hash_root() == store.hash_root() != other.hash_root()
    assert not list(other.names())
    store.delete("g0-00ff")
    store.delete("g0-00ff")
    assert not list(store.names())


def test_a_tier_evicts_what_was_used_longest_ago() -> None:
    plan = cache_of(ATTENTION).plan
    tier = Tier(plan, num_pages=3)

    def put(number: int) -> KVCacheBlock:
        block = tier.take(key(number))
        assert block is not None
        tier.publish(block, key(number), None)
        tier.free_blocks([block])
        return block

    blocks = [put(number) for number in range(3)]
    tier.refresh([blocks[0]])
    put(3)
    assert [number for number in range(4) if tier.block_of(key(number))] == [0, 2, 3]
    tier.touch([blocks[0], blocks[2]])
    put(4)
    assert tier.block_of(key(3)) is None
    held = tier.take(key(9))
    assert held is not None and tier.take(key(8)) is None, "all is in use"
    assert tier.used_bytes == 3 * plan.page_bytes


def test_a_prefix_may_lie_in_both_tiers() -> None:
    plan = cache_of(ATTENTION, STATE).plan
    host, files = Tier(plan, 3), Tier(plan, 3)
    names = [BlockHash(number.to_bytes(32, "big")) for number in range(4)]
    held = []
    for number, tier in ((0, files), (1, host), (3, files)):
        block, state = tier.take(key(number)), tier.take(key(number + 10, 1))
        assert block is not None and state is not None
        tier.publish(block, key(number), None)
        tier.publish(state, key(number + 10, 1), Tail(key(number + 10, 1), key(number, 1), 5))
        held.append(block)
    both = _Both(host, files)
    assert both.get_cached_run(names, 0) == held[:2]
    assert both.get_cached_run(names[2:], 0) == [] and host.get_cached_run(names, 0) == []
    assert list(both.followed_by_tails(names, 1)) == [3, 1, 0]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([(0, 4, 1)], [(0, 4, 1, 1)]),
        ([(0, 5, 2), (0, 4, 1), (0, 6, 3)], [(0, 4, 1, 3)]),
        ([(0, 4, 1), (0, 5, 3), (1, 5, 2), (1, 6, 3)], [(0, 4, 1, 1), (0, 5, 3, 1), (1, 5, 2, 2)]),
    ],
)
def test_neighbours_are_one_copy(places: list[Any], expected: list[Any]) -> None:
    assert list(runs(places)) == expected


def test_statistics_add_up_and_gauges_stay() -> None:
    stats = OffloadingStats({"load_bytes": 1, "host_used_bytes": 5})
    joined = stats.aggregate(OffloadingStats({"load_bytes": 2, "host_used_bytes": 3}))
    assert joined.reduce() == {"load_bytes": 3, "host_used_bytes": 3}
