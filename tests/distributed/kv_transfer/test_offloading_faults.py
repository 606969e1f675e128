# SPDX-License-Identifier: Apache-2.0
"""Broken data is never decoded: it is computed again, or its request ends with an error."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kv_transfer.offload_engines import (
    MB,
    await_deletes,
    connector_of,
    core_of,
    drain,
    engine,
    evict_device,
    metric,
    offloading,
    prompt,
    run,
    tokens,
    worker_connector_of,
)
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileStore

pytestmark = pytest.mark.slow

PROMPTS = [prompt(1, 70), prompt(2, 40)]


def nothing_is_held(llm: LLM) -> None:
    drain(llm)
    scheduling = connector_of(llm)._scheduling
    assert scheduling._host.usage == 0 and not scheduling.has_work()
    if scheduling._files is not None:
        assert scheduling._files.usage == 0
    assert not scheduling.stores._leaving and not scheduling.stores._read
    assert not scheduling.loads._matches
    assert core_of(llm).scheduler.kv_cache_manager.usage == 0


def break_host_block(llm: LLM, group: int) -> None:
    """Flip a bit in every block of the group that host memory holds."""
    transfers = worker_connector_of(llm)._transfers
    for block in connector_of(llm)._scheduling._host._cached.values():
        if block.group_id == group:
            transfers._host.block(group, block.block_id)[5] ^= 1


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_flipped_bit_in_host_memory(
    group: int, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the requests that load are touched, and only once: the broken copy is gone."""
    with engine(offloading(policy=policy)) as llm:
        expected = tokens(run(llm, *PROMPTS))
        evict_device(llm)
        break_host_block(llm, group)
        logging.getLogger("vllm").propagate = True
        other = prompt(9, 50)
        alone = tokens(run(llm, other))
        llm.reset_prefix_cache()
        outputs = run(llm, *PROMPTS, other)
        logging.getLogger("vllm").propagate = False
        assert "sealed with digest" in caplog.text and "arrived with" in caplog.text
        assert metric(llm, "broken_blocks") > 0
        if policy == "fail":
            assert [o.outputs[0].finish_reason for o in outputs[:2]] == ["error"] * 2
            assert [o.outputs[0].token_ids for o in outputs[:2]] == [[], []]
        else:
            assert tokens(outputs[:2]) == expected
            assert [o.num_cached_tokens for o in outputs[:2]] == [0, 0]
        assert tokens(outputs[2:]) == alone
        evict_device(llm)
        assert tokens(run(llm, *PROMPTS)) == expected
        nothing_is_held(llm)


@pytest.mark.parametrize("fault", ["flip", "cut", "gone"])
def test_damaged_files(fault: str, tmp_path: Path) -> None:
    """The content is checked whatever a restart finds."""
    with engine(offloading(root=tmp_path)) as llm:
        expected = tokens(run(llm, *PROMPTS))
        nothing_is_held(llm)
    files = sorted(tmp_path.glob("*/r0/*/*.bin"))
    assert files
    with engine(offloading(root=tmp_path)) as llm:
        for file in files:
            data = bytearray(file.read_bytes())
            if fault == "flip":
                data[-1] ^= 1
            file.write_bytes(data[: -1 if fault == "cut" else None])
            if fault == "gone":
                file.unlink()
        outputs = run(llm, *PROMPTS)
        assert tokens(outputs) == expected and outputs[0].num_cached_tokens == 0
        assert metric(llm, "broken_blocks") > 0
        nothing_is_held(llm)
        evict_device(llm)
        found = run(llm, *PROMPTS)
        assert tokens(found) == expected and found[0].num_cached_tokens


def test_a_load_that_fails_leaves_the_shared_prefix_alone() -> None:
    """The device has the first turn, host memory the second, which is broken."""
    with engine(offloading()) as llm:
        (first,) = run(llm, prompt(1, 70))
        drain(llm)
        second = [*prompt(1, 70), *first.outputs[0].token_ids, *prompt(3, 60)]
        expected = tokens(run(llm, second))
        drain(llm)
        evict_device(llm)
        run(llm, prompt(1, 70))  # the first turn is on the device again, from the host
        break_host_block(llm, 0)
        assert tokens(run(llm, second)) == expected
        nothing_is_held(llm)


def test_a_full_disk_costs_the_files_alone(tmp_path: Path) -> None:
    with engine(offloading(root=tmp_path)) as llm:
        for folder in tmp_path.glob("*/r0"):
            folder.rmdir()
            folder.write_text("")  # no directory can be made here
        expected = tokens(run(llm, *PROMPTS))
        nothing_is_held(llm)
        assert metric(llm, "file_write_failures") > 0
        evict_device(llm)
        outputs = run(llm, *PROMPTS)
        assert tokens(outputs) == expected and outputs[0].num_cached_tokens


def test_a_slow_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What host memory has no room for while files are written leaves later, as there is room."""
    write = FileStore.write

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        write(*arguments)

    monkeypatch.setattr(FileStore, "write", slow)
    prompts = [prompt(i, 100) for i in range(4)]
    with engine(offloading(cpu_bytes=MB // 5, root=tmp_path)) as llm:
        run(llm, *prompts)
        evict_device(llm)
        assert not metric(llm, "allocation_failure")
        for ids in prompts:
            assert run(llm, ids)[0].num_cached_tokens >= 96
            drain(llm)
        nothing_is_held(llm)


def test_small_tiers_evict_and_small_devices_reload(tmp_path: Path) -> None:
    """Everything is short of room, with the sanitizer watching the device."""
    prompts = [prompt(i, 60 + 11 * i) for i in range(6)]
    with engine(None) as llm:
        expected = tokens([output for ids in prompts for output in run(llm, ids)])
    transfer = offloading(cpu_bytes=MB // 2, root=tmp_path, max_bytes=MB)
    with engine(transfer, kv_cache_memory_bytes=MB // 2, sanitize=True) as llm:
        for _ in range(3):
            assert tokens([output for ids in prompts for output in run(llm, ids)]) == expected
            assert tokens(run(llm, *prompts)) == tokens(run(llm, *prompts))
        nothing_is_held(llm)
        gauges = connector_of(llm)._scheduling._gauges
    held = sum(file.stat().st_size for file in tmp_path.glob("*/r0/*/*.bin"))
    assert 0 < held <= gauges["file_bytes"] and gauges["host_used_bytes"] <= gauges["host_bytes"]


def test_reset_forgets_every_tier(tmp_path: Path) -> None:
    with engine(offloading(root=tmp_path)) as llm:
        run(llm, *PROMPTS)
        drain(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        assert run(llm, PROMPTS[0])[0].num_cached_tokens == 0
        drain(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        drain(llm)
    assert not list(tmp_path.glob("*/r0/*/*.bin"))


def test_files_are_gone_before_the_engine_sleeps(tmp_path: Path) -> None:
    """No step runs for them while the memory sleeps."""
    with engine(offloading(root=tmp_path), enable_sleep_mode=True) as llm:
        run(llm, prompt(1, 70))
        drain(llm)
        assert list(tmp_path.rglob("*.bin"))
        llm.sleep(2)
        assert not connector_of(llm).has_pending_push_work()
        await_deletes(llm)
        assert not list(tmp_path.rglob("*.bin"))
