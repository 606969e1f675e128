# SPDX-License-Identifier: Apache-2.0
"""New weights: no tier gives back what others computed, whatever is on its way meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.kv_transfer.offload_engines import (
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
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.transfers import Transfers

pytestmark = pytest.mark.slow

PROMPT = prompt(1, 70)


def change_weights(llm: LLM) -> None:
    """What a method of the user's own may do."""
    worker = core_of(llm).executor.worker
    with torch.no_grad():
        for parameter in worker.get_model().parameters():
            parameter.mul_(1.25)


def forget(llm: LLM) -> bool:
    return llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """With the checkpoint's weights, and with the changed ones."""
    with engine(None) as llm:
        before = tokens(run(llm, PROMPT))
        change_weights(llm)
        assert llm.reset_prefix_cache()
        after = tokens(run(llm, PROMPT))
    assert before != after
    return before, after


@contextmanager
def loading(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A request waits for its state, which arrives when this ends."""
    evict_device(llm)
    go_on, fill = threading.Event(), Transfers._fill

    def held_back(*arguments: Any) -> None:
        go_on.wait(60)
        fill(*arguments)

    monkeypatch.setattr(Transfers, "_fill", held_back)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    llm.llm_engine.add_request("late", TokensPrompt(prompt_token_ids=PROMPT), params)
    try:
        while not core_of(llm).scheduler.transfer.loading:
            llm.llm_engine.step()
        yield
    finally:
        go_on.set()


def answer(llm: LLM) -> list[list[int]]:
    """Of the request that waited."""
    found: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        found += [output for output in llm.llm_engine.step() if output.finished]
    return tokens(found)


def nothing_is_held(llm: LLM) -> None:
    drain(llm)
    scheduling = connector_of(llm)._scheduling
    assert scheduling._host.usage == 0 and not scheduling.has_work()
    assert scheduling._files is None or scheduling._files.usage == 0
    assert not scheduling.loads._doomed and not scheduling.stores._writing
    assert core_of(llm).scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("source", ["host", "files"])
def test_a_load_on_its_way_is_not_used(
    source: str,
    policy: str,
    expected: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path if source == "files" else None
    if root is not None:
        with engine(offloading(root=root)) as llm:
            run(llm, PROMPT)
            drain(llm)
    with engine(offloading(root=root, policy=policy)) as llm:
        if root is None:
            assert tokens(run(llm, PROMPT)) == expected[0]
        with loading(llm, monkeypatch):
            change_weights(llm)
            assert forget(llm)
        assert answer(llm) == expected[1]
        nothing_is_held(llm)
        evict_device(llm)
        found = run(llm, PROMPT)
        assert tokens(found) == expected[1] and found[0].num_cached_tokens, "it is stored anew"


def test_what_has_come_but_not_started_is_not_used(
    expected: tuple[list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(offloading()) as llm:
        run(llm, PROMPT)
        evict_device(llm)
        scheduler = core_of(llm).scheduler
        with loading(llm, monkeypatch):
            pass
        while not scheduler.transfer.received:
            worker_connector_of(llm).wait_for_transfers(1)
            core_of(llm).step()
        change_weights(llm)
        assert forget(llm)
        assert answer(llm) == expected[1]
        nothing_is_held(llm)


def test_reloading_during_a_load_forgets_every_tier(
    expected: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine(offloading(root=tmp_path)) as llm:
        run(llm, PROMPT)
        with loading(llm, monkeypatch):
            hits = metric(llm, "hit_tokens")
            llm.collective_rpc("reload_weights")
        assert answer(llm) == expected[0]
        assert metric(llm, "hit_tokens") == hits, "nothing was there to be found again"
        nothing_is_held(llm)


def test_a_reload_that_fails_forgets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the weights may be new."""
    with engine(offloading()) as llm:
        run(llm, PROMPT)
        drain(llm)

        def fails() -> None:
            raise OSError("no such file")

        monkeypatch.setattr(core_of(llm).executor.worker.model_runner, "load_weights", fails)
        with pytest.raises(Exception, match="no such file"):
            llm.collective_rpc("reload_weights")
        assert run(llm, PROMPT)[0].num_cached_tokens == 0


def test_a_restart_finds_nothing_of_changed_weights(
    expected: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    """They are in no checkpoint, so its identity is not theirs; nor do they leave the files behind
    that they would read themselves."""
    with engine(offloading(root=tmp_path)) as llm:
        run(llm, PROMPT)
        drain(llm)
        old = set(tmp_path.glob("*/r0/*/*.bin"))
        change_weights(llm)
        assert forget(llm)
        assert tokens(run(llm, PROMPT)) == expected[1]
        drain(llm)
        await_deletes(llm)
        new = set(tmp_path.glob("*/r0/*/*.bin"))
        assert new and not new & old
        evict_device(llm)
        found = run(llm, PROMPT)
        assert tokens(found) == expected[1] and found[0].num_cached_tokens
        assert forget(llm)
        drain(llm)
        await_deletes(llm)
        assert not set(tmp_path.glob("*/r0/*/*.bin"))
        assert tokens(run(llm, PROMPT)) == expected[1]
        drain(llm)
    with engine(offloading(root=tmp_path)) as llm:
        found = run(llm, PROMPT)
        assert tokens(found) == expected[0] and found[0].num_cached_tokens == 0
