# SPDX-License-Identifier: Apache-2.0
"""What subscribers hear is what the prefix cache can find."""

from __future__ import annotations

import random

import pytest
from state_cases import BLOCK, done, full, hidden, kv_config, manager_of, recurrent, request, window

from tests.distributed.kv_events.subscriber import Index, Subscriber, is_true
from tests.v1.core.test_kv_cache_manager_properties import MAX_LEN, PROMPTS, STEP, Engine
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id


@pytest.fixture(autouse=True)
def hashes_as_bytes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def entries(manager):
    return {(get_group_id(key), get_block_hash(key)) for key in manager.block_pool._cached}


def listening(specs, num_pages, **options):
    return manager_of(specs, num_pages, enable_kv_cache_events=True, **options)


def test_a_prompt_is_one_event_per_group():
    manager = listening([full(), window(20)], 40)
    done(manager, "a", range(50))
    first, second = manager.take_events()
    assert manager.take_events() == []
    for group, (event, kind) in enumerate(zip((first, second), ("full", "sliding"), strict=True)):
        assert isinstance(event, BlockStored) and len(event.block_hashes) == 3
        assert event.token_ids == list(range(48)) and event.block_size == BLOCK
        assert (event.parent_block_hash, event.group_idx, event.medium) == (None, group, "GPU")
        assert event.kv_cache_spec_kind.startswith(kind)
    assert second.kv_cache_spec_sliding_window == 20
    done(manager, "b", [*range(48), *range(200, 220)])
    longer = manager.take_events()[0]
    assert longer.parent_block_hash == first.block_hashes[-1]
    assert longer.token_ids == list(range(200, 216))


def test_larger_blocks_say_where_they_begin():
    manager = listening([full(block_size=32), recurrent(block_size=4096)], 40)
    done(manager, "a", range(100))
    done(manager, "b", [*range(64), *range(200, 240)])
    first, second = (e for e in manager.take_events() if e.group_idx == 0 and e.block_size == 32)
    assert first.token_ids == list(range(96)) and len(first.block_hashes) == 3
    assert second.token_ids == list(range(200, 232))
    assert second.parent_block_hash == first.block_hashes[1]


def test_eviction_and_reset():
    manager = listening([full()], 5)
    done(manager, "a", range(40))
    (stored,) = manager.take_events()
    done(manager, "b", range(100, 160))
    removed, *_ = manager.take_events()
    assert isinstance(removed, BlockRemoved) and removed.group_idx == 0
    assert set(removed.block_hashes) <= set(stored.block_hashes)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_extra_keys_and_adapters():
    manager = listening([full()], 40)
    req = request("a", range(40), cache_salt="s", lora_request=LoRARequest("mine", 3))
    assert manager.allocate_slots(req, 40)
    (event,) = manager.take_events()
    assert event.extra_keys == [("mine", "s"), ("mine",)]
    assert (event.lora_name, event.lora_id) == ("mine", 3)


def test_a_checkpoint_is_told_with_its_own_length():
    engine = Engine([full(), recurrent()], 20, [1, 1])
    engine.manager = listening([full(), recurrent()], 20, max_model_len=MAX_LEN)
    engine.waiting.append(request("a", range(40)))
    for _ in range(3):
        engine.step(STEP)
    index = Index()
    index.apply(KVEventBatch(0.0, engine.manager.take_events()))
    (checkpoint,) = [e for (group, _), e in index.entries.items() if group == 1]
    assert checkpoint.kv_cache_spec_kind == "mamba" and 0 < checkpoint.block_size < BLOCK
    assert checkpoint.token_ids == list(range(32, 32 + checkpoint.block_size))


def test_nothing_to_tell_is_an_error():
    for options in ({"enable_caching": False}, {"specs": []}):
        specs = options.pop("specs", [full()])
        with pytest.raises(ValueError, match="need the prefix cache"):
            listening(specs, 10, **options)
    manager = manager_of([full()], 10)
    done(manager, "a", range(40))
    assert manager.take_events() == [] and manager.block_pool.events is None


def test_kinds():
    specs = [full(), window(9), hidden(), recurrent()]
    kinds = ["full_attention", "sliding_window", "hidden_states", "mamba"]
    assert [spec.kind for spec in specs] == kinds


SPECS = [full(), hidden(), window(20), recurrent()]


def random_step(engine, rng, number):
    action = rng.randrange(10)
    if action < 4:
        for i in range(1 + action % 3):
            prompt = rng.choice(PROMPTS)
            fields = {"cache_salt": "s"} if action == 1 else {}
            engine.waiting.append(request(f"r{number}.{i}", prompt, **fields))
    elif action == 4 and engine.running:
        engine.finish(rng.choice(engine.running))
    elif action == 5 and engine.running:
        engine.preempt(engine.running.pop())
    elif action == 6:
        engine.manager.reset_prefix_cache()
    engine.step(rng.choice((STEP, 7, 200)))


@pytest.mark.parametrize("seed", range(4))
def test_a_subscriber_that_loses_messages_rebuilds_the_index(seed, tmp_path):
    rng = random.Random(seed)
    specs = SPECS[: seed + 1]
    engine = Engine(specs, 44, [1] * len(specs))
    config = kv_config(specs, 44, [1] * len(specs))
    engine.manager = KVCacheManager(
        config,
        MAX_LEN,
        max_num_batched_tokens=200,
        enable_caching=True,
        enable_kv_cache_events=True,
    )
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, *endpoints)
    subscriber = Subscriber(*endpoints)
    sent = 0
    try:
        for number in range(150):
            random_step(engine, rng, number)
            if events := engine.manager.take_events():
                publisher.publish(EventBatch(0.0, events))
                sent += 1
            if number % 50 == 49:
                subscriber.follow(sent, rng, loss=0.3)
                assert set(subscriber.index.entries) == entries(engine.manager)
                assert all(is_true(e, sha256) for e in subscriber.index.entries.values())
        assert subscriber.num_replayed and subscriber.index.entries
    finally:
        subscriber.close()
        publisher.shutdown()
