# SPDX-License-Identifier: Apache-2.0
"""A client of KV events: keeps an index of what the engine's prefix cache can find."""

from __future__ import annotations

import random
import time

import msgspec
import zmq

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, hash_block_tokens

TIMEOUT_MS = 60_000
END = -1


class Index:
    """Entries `(group, hash)` and what was told of each."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int | None, ExternalBlockHash], BlockStored] = {}

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.entries.clear()
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.entries[event.group_idx, block_hash]
            else:
                for entry in split(event):
                    key = entry.group_idx, entry.block_hashes[0]
                    assert key not in self.entries, "stored twice"
                    self.entries[key] = entry


def split(event: BlockStored) -> list[BlockStored]:
    """The same as events of one entry each."""
    size = event.block_size
    assert len(event.token_ids) == size * len(event.block_hashes)
    assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
    entries, parent = [], event.parent_block_hash
    for i, block_hash in enumerate(event.block_hashes):
        entries.append(
            msgspec.structs.replace(
                event,
                block_hashes=[block_hash],
                parent_block_hash=parent,
                token_ids=event.token_ids[i * size : (i + 1) * size],
                extra_keys=None if event.extra_keys is None else [event.extra_keys[i]],
            )
        )
        parent = block_hash
    return entries


def is_true(entry: BlockStored, hash_fn) -> bool:
    """Whether parent, tokens and extra keys are really what the hash (bytes) was made of."""
    (block_hash,), parent = entry.block_hashes, entry.parent_block_hash
    assert isinstance(block_hash, bytes) and (parent is None or isinstance(parent, bytes))
    keys = entry.extra_keys[0] if entry.extra_keys is not None else None
    of = None if parent is None else BlockHash(parent)
    return hash_block_tokens(hash_fn, of, entry.token_ids, keys and tuple(keys)) == block_hash


class Subscriber:
    """Applies batches in the order of their numbers; loses messages on purpose, and asks the
    replay socket for what is missing."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.index = Index()
        self.next = 0
        self.num_replayed = 0
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._events.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self._topic = topic.encode()

    def receive(self, timeout_ms: int = TIMEOUT_MS) -> tuple[int, bytes] | None:
        """`(number, payload)` of the next message, None if none comes."""
        if not self._events.poll(timeout_ms):
            return None
        topic, number, payload = self._events.recv_multipart()
        assert topic == self._topic and len(number) == 8
        return int.from_bytes(number, "big"), payload

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """What the publisher still has from `first` on."""
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self._replay.poll(TIMEOUT_MS), "no answer from the replay socket"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def apply(self, number: int, payload: bytes) -> None:
        assert number == self.next
        self.index.apply(msgspec.msgpack.decode(payload, type=KVEventBatch))
        self.next += 1

    def catch_up(self) -> None:
        """Apply everything the publisher has sent that this side has not seen."""
        for number, payload in self.replay(self.next):
            self.apply(number, payload)
            self.num_replayed += 1

    def follow(self, until: int, rng: random.Random, loss: float) -> None:
        """Apply batches up to number `until - 1`, losing that part of the messages."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while self.next < until:
            assert time.monotonic() < deadline
            message = self.receive(100)
            if message is None:
                self.catch_up()  # the last ones were lost
            elif rng.random() >= loss and message[0] >= self.next:
                if message[0] > self.next:
                    self.catch_up()
                else:
                    self.apply(*message)

    def close(self) -> None:
        self._context.destroy(linger=0)
