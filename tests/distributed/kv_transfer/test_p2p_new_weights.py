# SPDX-License-Identifier: Apache-2.0
"""Engines whose weights are replaced: state of the old ones is neither kept nor taken."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.kv_transfer.offload_engines import (
    drain,
    prompt,
    worker_connector_of,
)
from tests.distributed.kv_transfer.p2p_engines import ask, hand_on, transfer
from tests.distributed.kv_transfer.test_p2p_faults import (
    expect_recomputed,
    left_behind,
    loopback,
    sender_of,
)
from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.testing.connectors.checks import running

TOKENS = prompt(5, 60)


def change_weights(model: Path) -> None:
    """What a training run writes over its last checkpoint."""
    for path in model.glob("*.safetensors"):
        weights = load_file(path)
        changed = {name: w * 1.25 if w.is_floating_point() else w for name, w in weights.items()}
        save_file(changed, path, metadata={"format": "pt"})


@contextmanager
def reloading(model: Path, role: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(
            str(model),
            max_model_len=128,
            dtype="float32",
            kv_cache_memory_bytes=2**24,
            kv_transfer_config=transfer(role),
        )
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def answer(llm: LLM, **params: object) -> tuple[str | None, list[int]]:
    """Why the text ended, and its tokens."""
    [output] = ask(llm, TOKENS, 6, **params).outputs
    return output.finish_reason, list(output.token_ids)


@pytest.mark.slow
def test_a_pair_of_which_one_was_reloaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing passes between them until the other one has the new weights, too."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    with reloading(model, "kv_producer") as first, reloading(model, "kv_consumer") as second:
        _, old = answer(second, **hand_on(first, TOKENS))
        left = hand_on(first, TOKENS)
        drain(first)
        sender = worker_connector_of(first)._sender
        assert sender._held
        change_weights(model)
        first.collective_rpc("reload_weights")
        drain(first)
        assert not sender._held and not sender._staging.used_bytes
        assert answer(second, **left)[0] == "error"
        assert "dropped when the engine's cache was reset" in caplog.text
        assert answer(second, **hand_on(first, TOKENS))[0] == "error"
        assert "keeps other state than this engine: weights[0][2] is" in caplog.text
        second.collective_rpc("reload_weights")
        reason, new = answer(second, **hand_on(first, TOKENS))
        assert reason == "length" and new != old
        assert new == answer(first)[1]


def test_what_waits_to_leave_is_withdrawn(tmp_path: Path) -> None:
    """Requests that ended before the reset; their blocks are free all the same."""
    with running(loopback(), "attention", tmp_path) as engine:
        turn = left_behind(engine)
        name = engine.add(turn)
        while name not in engine.outputs:
            engine.step()
        assert engine.connector._scheduling._metadata.sends  # type: ignore[attr-defined]
        engine.config.model_config.seed = 7  # which is all that dummy weights depend on
        assert engine.connector.reset_cache() is True
        engine.settle()
        sender = sender_of(engine)
        assert not sender._held and not sender._staging.used_bytes
        assert sender._identity["weights"] == ["dummy", 7]
        engine.evict_device()
        expect_recomputed(engine, turn)
        [held] = sender._held.values()
        assert held.description["weights"] == ["dummy", 7]


def test_what_is_being_staged_is_dropped(tmp_path: Path) -> None:
    with running(loopback(), "attention", tmp_path) as engine:
        sender = sender_of(engine)
        digests = sender._sealer.digests

        def late(segment: torch.Tensor, spans: list[tuple[int, int]]) -> list[int]:
            sender.reset(["new"])
            return list(digests(segment, spans))

        sender._sealer.digests = late
        turn = left_behind(engine)
        sender._sealer.digests = digests
        assert not sender._held and not sender._staging.used_bytes
        expect_recomputed(engine, turn)


def test_a_reset_does_not_wait_for_loads(tmp_path: Path) -> None:
    """The scheduler does not use what they bring."""
    with running(loopback(timeout_s=60.0), "attention", tmp_path) as engine:
        engine.add(left_behind(engine))
        go_on = threading.Event()
        handlers = engine.worker._server._handlers  # type: ignore[attr-defined]
        describe = handlers["describe"]

        def late(connection: socket.socket, message: dict[str, Any]) -> None:
            assert go_on.wait(60)
            describe(connection, message)

        handlers["describe"] = late
        engine.step()
        assert engine.connector.reset_cache() is True
        go_on.set()
        engine.settle()
