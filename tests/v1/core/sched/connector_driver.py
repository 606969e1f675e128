# SPDX-License-Identifier: Apache-2.0
"""A scheduler with a KV connector whose reports tests make."""

from __future__ import annotations

import random

from tests.v1.core.sched.helpers import Driver, make_scheduler
from tests.v1.engine.fakes import BLOCK_SIZE, EOS, expected_tokens, prefix_hash
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput


def make_driver(connector="AllGroupsConnector", policy="fail", **options):
    config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="tests.v1.core.sched.fake_connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
    )
    driver = Driver(make_scheduler(kv_transfer_config=config, **options))
    driver.connector = driver.scheduler.connector
    return driver


def report(driver, **fields):
    """Deliver a connector report with the oldest step in flight (or an empty one)."""
    if not driver.in_flight:
        driver.launch()
    driver.in_flight[0][1].kv_connector_output = KVConnectorOutput(**fields)
    return driver.collect()


def fill(driver, request, num_tokens):
    """What a load would write: the slots of the request's first tokens."""
    blocks = driver.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    for position in range(num_tokens):
        slot = blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        driver.worker.slots[slot] = prefix_hash(request.all_token_ids[: position + 1])


def launch_loading(driver, request, num_tokens):
    """Launch a step that loads the request's first tokens; returns the first group's blocks."""
    output = driver.scheduler.schedule()
    fill(driver, request, num_tokens)
    driver.in_flight.append((output, driver.worker.execute(output)))
    return driver.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]


def prompt_of(seed, length):
    return random.Random(seed).choices(range(20, 1000), k=length)


def expect(driver, request_id, prompt, max_tokens=8):
    params = SamplingParams(max_tokens=max_tokens)
    assert driver.tokens[request_id] == expected_tokens(prompt, params, eos=EOS)
