# SPDX-License-Identifier: Apache-2.0
"""What the first host of an engine and another one say to each other.

The first message is JSON, which any version reads. The first byte of all others is their `Tag`.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.executor.worker_process import WorkerPlan

#: the reason of a host that a signal ends before it has an engine, or that is not the first one
TOLD_TO_STOP = "it was told to stop"
#: tells a node's first message from a stranger's
_PROTOCOL = "vllm-node-1"


class Tag(enum.IntEnum):
    """To another node: `SETUP` a pickled `NodeSetup` once all nodes are there, `WORK` a message for
    its workers, `END` JSON with the `reason`, null for a stop that was asked for. To the first
    node: `ANSWER` four bytes of rank and a pickled answer, `DIED` JSON about a worker, `LEAVING`
    JSON with the `reason`, `BEAT` once a second JSON with the ranks whose workers are `working`."""

    SETUP = 0
    WORK = 1
    END = 2
    ANSWER = 3
    DIED = 4
    LEAVING = 5
    BEAT = 6

    def of(self, content: bytes) -> bytes:
        """The message."""
        return bytes((self,)) + content

    def of_json(self, **content: Any) -> bytes:
        return self.of(json.dumps(content).encode())


@dataclass(frozen=True)
class Hello:
    """A node's first message: see `node_agreement.agreement`; `devices`: names, in rank order."""

    node_rank: int
    agreement: dict[str, str]
    devices: list[str]

    def encode(self) -> bytes:
        return json.dumps({"protocol": _PROTOCOL, **asdict(self)}).encode()

    @classmethod
    def decode(cls, message: bytes) -> Hello | None:
        """None for what is no such message."""
        try:
            content = json.loads(message)
            if content.pop("protocol") != _PROTOCOL:
                return None
            return cls(**content)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True)
class NodeSetup:
    """What a node's workers start from, and their ranks."""

    plan: WorkerPlan
    ranks: range
