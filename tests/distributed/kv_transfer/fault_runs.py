# SPDX-License-Identifier: Apache-2.0
"""Short random lives of an engine whose messages, bytes and files go wrong at random points.

A run ends well if every request has the tokens of computing it, or one clear error where the policy
says so, and neither side holds anything afterwards.
"""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed.kv_transfer import fault_runs
from tests.distributed.kv_transfer.loopback_connector import (
    LoopbackConnector,
    NixlLoopbackConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileStore, store_identity
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Handler
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import P2pConnector
from vllm.testing.connectors import ConnectorCase
from vllm.testing.connectors.checks import prompt, running
from vllm.testing.connectors.engine import SimulatedEngine, expected_output
from vllm.v1.engine import FinishReason

#: how a message or a block goes wrong; `reorder` delays one so that others overtake it
FAULTS = ("drop", "delay", "reorder", "corrupt", "disconnect", "short")
#: a consumer waits so long for a peer that says nothing
TIMEOUT_S = 0.25


class Faults:
    """Draws from any thread; `rate`: share of messages and blocks that go wrong."""

    def __init__(self, seed: int, rate: float) -> None:
        self._generator, self._rate = random.Random(seed), rate
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.ended = threading.Event()

    def draw(self) -> str | None:
        with self._lock:
            if self.ended.is_set() or self._generator.random() >= self._rate:
                return None
            fault = self._generator.choice(FAULTS)
            self.counts[fault] += 1
            return fault

    def below(self, bound: int) -> int:
        with self._lock:
            return self._generator.randrange(bound)

    def wait(self, fault: str) -> None:
        if fault in ("delay", "reorder"):
            time.sleep(0.001 * (1 + self.below(5 if fault == "delay" else 30)))

    def damage(self, data: bytes, fault: str) -> bytes:
        """One bit changed, or the end cut off."""
        if not data:
            return data
        if fault == "short":
            return data[: self.below(len(data))]
        changed = bytearray(data)
        changed[self.below(len(data))] ^= 1 << self.below(8)
        return bytes(changed)


# ---- messages between engines -------------------------------------------------------------------


class _Line:
    """A connection on which what is sent goes wrong."""

    def __init__(self, connection: socket.socket, faults: Faults, fault: str) -> None:
        self._connection, self._faults, self._fault = connection, faults, fault

    def sendall(self, data: Any) -> None:
        if self._fault:
            fault, self._fault = self._fault, ""
            self._connection.sendall(self._faults.damage(bytes(data), fault))
            if fault == "short":
                self._connection.shutdown(socket.SHUT_RDWR)
        else:
            self._connection.sendall(data)


def faulty(handler: Handler, faults: Faults) -> Handler:
    def handle(connection: socket.socket, message: dict[str, Any]) -> None:
        fault = faults.draw()
        if fault in ("corrupt", "short"):
            handler(_Line(connection, faults, fault), message)  # type: ignore[arg-type]
        elif fault == "disconnect":
            connection.shutdown(socket.SHUT_RDWR)
        elif fault == "drop":
            while not faults.ended.is_set():  # until the other side has given up
                if select.select([connection], [], [], 0.01)[0]:
                    break
        else:
            if fault is not None:
                faults.wait(fault)
            handler(connection, message)

    return handle


def spoil_messages(engine: SimulatedEngine, faults: Faults) -> None:
    assert isinstance(engine.worker, P2pConnector) and engine.worker._server is not None
    handlers: Any = engine.worker._server._handlers
    for op, handler in list(handlers.items()):
        handlers[op] = faulty(handler, faults)


def kill_peer(engine: SimulatedEngine) -> None:
    assert isinstance(engine.worker, P2pConnector) and engine.worker._server is not None
    engine.worker._server.close()


def peers_hold_nothing(engine: SimulatedEngine) -> None:
    """Nothing of any request at the consumer; at the producer nothing once the leases end."""
    assert isinstance(engine.worker, P2pConnector)
    sender, receiver = engine.worker._sender, engine.worker._receiver
    assert sender is not None and receiver is not None
    wait_until(lambda: not receiver._expected and not receiver._staging.used_bytes)
    with sender._changed:
        for held in sender._held.values():
            held.deadline = time.monotonic()
        sender._changed.notify_all()
    wait_until(lambda: not sender._held and not sender._staging.used_bytes)
    assert not engine.worker._places


# ---- files --------------------------------------------------------------------------------------


class FaultyFiles(FileStore):
    """Files of a disk that is slow, full, gone or damaged."""

    faults: Faults

    def write(self, name: str, data: np.ndarray, sealed: int) -> None:
        fault = self.faults.draw()
        if fault == "disconnect":
            raise OSError(5, "the disk is gone")
        if fault is not None:
            self.faults.wait(fault)
        super().write(name, data, sealed)
        path = Path(self.path(name))
        if fault == "drop":
            path.unlink(missing_ok=True)
        elif fault in ("corrupt", "short"):
            path.write_bytes(self.faults.damage(path.read_bytes(), fault))

    def read(self, name: str, target: np.ndarray) -> int:
        fault = self.faults.draw()
        if fault in ("disconnect", "drop"):
            raise OSError(5, "the disk is gone")
        if fault is not None:
            self.faults.wait(fault)
        sealed = super().read(name, target)
        if fault in ("corrupt", "short"):
            damaged = self.faults.damage(target.tobytes(), fault)
            target[: len(damaged)] = np.frombuffer(damaged, target.dtype)
            target[len(damaged) :] = 0
        return sealed


class FaultyOffloading(OffloadingConnector):
    """Its files are `FaultyFiles`; they get their faults from `spoil_storage`."""

    def _file_store(self, rank: int) -> FaultyFiles | None:
        if self._settings.files is None:
            return None
        identity = store_identity(self._vllm_config, self._config)
        store = FaultyFiles(self._settings.files.root_dir, identity, rank)
        store.faults = Faults(0, 0.0)
        return store


def spoil_storage(engine: SimulatedEngine, faults: Faults) -> None:
    transfers: Any = engine.worker._transfers  # type: ignore[attr-defined]
    if transfers._files is not None:
        transfers._files.faults = faults


def spoil_memory(engine: SimulatedEngine) -> None:
    """Damage all that is in host memory, once what is there has its digest."""
    transfers: Any = engine.worker._transfers  # type: ignore[attr-defined]
    transfers._threads.shutdown(wait=True)
    transfers._threads = ThreadPoolExecutor(2, "kv-offload")
    transfers._host.buffer.bitwise_xor_(1)


def tiers_hold_nothing(engine: SimulatedEngine) -> None:
    scheduling: Any = engine.connector._scheduling  # type: ignore[attr-defined]
    assert not scheduling.has_work() and not scheduling.loads._loads
    for tier in (scheduling._host, scheduling._files):
        assert tier is None or tier.usage == 0
    assert not scheduling.stores._leaving and not scheduling.stores._read
    assert not engine.worker._load_blocks  # type: ignore[attr-defined]


# ---- runs ---------------------------------------------------------------------------------------


class Kind:
    """What is run: `spoil` lets faults in, `strike` is the one blow at a random point, and
    `check_empty` looks at both sides in the end."""

    def __init__(
        self,
        connector: type,
        extra: dict[str, Any],
        spoil: Callable[[SimulatedEngine, Faults], None],
        strike: Callable[[SimulatedEngine], None],
        check_empty: Callable[[SimulatedEngine], None],
    ) -> None:
        config = {
            "kv_connector": connector.__name__,
            "kv_connector_module_path": connector.__module__,
            "kv_connector_extra_config": extra,
        }
        self.case = ConnectorCase(config)
        self.spoil, self.strike, self.check_empty = spoil, strike, check_empty


_PEER = {"host": "127.0.0.1", "port": 0, "staging_bytes": 2**20, "timeout_s": TIMEOUT_S}
_FILES = [{"type": "fs", "root_dir": "{storage}", "max_bytes": 200_000}]
KINDS = {
    "offload": Kind(
        FaultyOffloading,
        {"cpu_bytes_to_use": 60_000},
        spoil_storage,
        spoil_memory,
        tiers_hold_nothing,
    ),
    "files": Kind(
        FaultyOffloading,
        {"cpu_bytes_to_use": 16_400, "secondary_tiers": _FILES, "eviction_policy": "arc"},
        spoil_storage,
        spoil_memory,
        tiers_hold_nothing,
    ),
    "p2p": Kind(LoopbackConnector, _PEER, spoil_messages, kill_peer, peers_hold_nothing),
    "nixl": Kind(NixlLoopbackConnector, _PEER, spoil_messages, kill_peer, peers_hold_nothing),
}
assert FaultyOffloading.__module__ == fault_runs.__name__
LAYOUTS = ("attention", "window", "hybrid", "hybrid_rows")


def wait_until(condition: Callable[[], object]) -> None:
    """The time is that of a machine that hangs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.001)


def _next_prompt(
    engine: SimulatedEngine, prompts: dict[str, list[int]], generator: random.Random
) -> list[int]:
    """A new one, or the next turn of a conversation."""
    ended = [n for n in prompts if engine.reason(n) is FinishReason.LENGTH and len(prompts[n]) < 90]
    if ended and generator.random() < 0.7:
        name = generator.choice(ended)
        return [*prompts[name], *engine.tokens[name], *prompt(generator.randrange(9), 9, 0)]
    return prompt(generator.randrange(4), generator.randrange(2, 90))


def run(kind: Kind, seed: int, directory: Path) -> Counter[str]:
    """One life; how often what happened."""
    generator = random.Random(seed)
    layout, policy = generator.choice(LAYOUTS), generator.choice(("recompute", "fail"))
    faults = Faults(seed, generator.choice((0.0, 0.05, 0.2, 0.5)))
    blow = generator.randrange(40)
    counts: Counter[str] = Counter()
    with running(
        kind.case,
        layout,
        directory / str(seed),
        policy=policy,
        room=generator.choice((1.5, 3.0, 5.0)),
        report_delay=lambda: generator.choice((0, 0, 1, 4)),
    ) as engine:
        kind.spoil(engine, faults)
        prompts: dict[str, list[int]] = {}
        aborted: set[str] = set()
        struck = False
        try:
            for step in range(24):
                event = generator.random()
                if event < 0.35 and len(engine.scheduler.requests) < 6:
                    tokens = _next_prompt(engine, prompts, generator)
                    prompts[engine.add(tokens, generator.randrange(1, 4))] = tokens
                elif event < 0.4 and (running_now := sorted(engine.scheduler.requests)):
                    aborted.add(running_now[0])
                    engine.abort(running_now[0])
                elif event < 0.45:
                    engine.preempt()
                elif event < 0.55:
                    engine.evict_device()
                if step == blow:
                    kind.strike(engine)
                    struck = True
                engine.step()
            engine.settle()
        finally:
            faults.ended.set()
        for name, tokens in prompts.items():
            if name in aborted:
                continue
            reason = engine.reason(name)
            if reason is FinishReason.ERROR:
                assert policy == "fail" and (struck or faults.counts), f"seed {seed}: {name}"
                assert engine.outputs[name].error is not None
                counts["errors"] += 1
                continue
            expected = expected_output(tokens, engine.requests[name].max_tokens)
            assert engine.tokens[name] == expected, f"seed {seed}: {name} ended with {reason}"
            counts["right"] += 1
            counts["loaded"] += engine.requests[name].num_external_computed_tokens > 0
        kind.check_empty(engine)
    counts.update(faults.counts)
    counts["struck"] += struck
    return counts
