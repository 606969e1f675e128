# SPDX-License-Identifier: Apache-2.0
"""KV events of a whole engine: published by its core process, heard over ZMQ."""

from __future__ import annotations

import random
import time

import pytest

from tests.distributed.kv_events.subscriber import Subscriber, is_true
from tests.v1.engine.fakes import BLOCK_SIZE, VOCAB_SIZE, FakeExecutor, make_vllm_config
from vllm.config import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.usefixtures("forking")


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # one hash of the empty prefix for both processes
    config = make_vllm_config(num_blocks=40)
    config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
    )
    made = LLMEngine(config, FakeExecutor, False, True)
    yield made
    made.shutdown()


def until(subscriber, condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, subscriber.index.entries
        subscriber.catch_up()


def test_a_late_subscriber_knows_the_cache(engine, tmp_path, monkeypatch):
    hash_fn = get_hash_fn_by_name(engine.vllm_config.cache_config.prefix_caching_hash_algo)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", hash_fn("0"))
    prompt = random.Random(0).choices(range(20, VOCAB_SIZE), k=4 * BLOCK_SIZE + 3)
    engine.add_request("a", prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    tokens = prompt + list(outputs[0].outputs[0].token_ids)
    subscriber = Subscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    try:
        until(subscriber, lambda: len(subscriber.index.entries) == 5)
        told = [e.token_ids for e in subscriber.index.entries.values()]
        assert told == [tokens[i : i + BLOCK_SIZE] for i in range(0, 5 * BLOCK_SIZE, BLOCK_SIZE)]
        assert all(is_true(entry, hash_fn) for entry in subscriber.index.entries.values())
        # Nothing runs any more: the reset itself has to publish.
        assert engine.reset_prefix_cache()
        until(subscriber, lambda: not subscriber.index.entries)
    finally:
        subscriber.close()


def test_an_endpoint_that_cannot_be_had_stops_the_start(tmp_path):
    config = make_vllm_config(num_blocks=40)
    endpoint = f"ipc://{tmp_path}/no/such/directory"
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
    with pytest.raises(ValueError, match="cannot be published"):
        LLMEngine(config, FakeExecutor, False, True)
