# SPDX-License-Identifier: Apache-2.0
"""What a prefix cache for recurrent layers may keep, and what it is worth: policies to compare.

`Aligned` and `EveryBlock` are the two modes vLLM documents (`--mamba-cache-mode align` and `all`):
pages of one size, so that an attention block grows to the tokens that weigh as much as a state, and
a state exists at block boundaries only. `Exact` asks the engine's own object.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.agent_trace import TraceRequest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.checkpoint_policy import CheckpointPolicy
from vllm.v1.core.explain import explain

MODEL = Path(__file__).resolve().parent / "qwen3_5_4b"
#: tokens a step computes at most
STEP_TOKENS = 8192
#: tokens of one chunk of the recurrent kernel
CHUNK = 64


@dataclass(frozen=True)
class Sizes:
    """Bytes of one paged block of `unit` tokens, and of one checkpoint."""

    unit: int
    block_bytes: int
    state_bytes: int


class Policy(Protocol):
    """What is kept, and what a thing kept is worth."""

    @property
    def name(self) -> str: ...

    @property
    def sizes(self) -> Sizes: ...

    def prompt_positions(self, request: TraceRequest, start: int, diverged: int) -> list[int]:
        """Token counts after `start` at which computing the prompt leaves a state. `diverged`:
        tokens whose blocks were found, whether or not a state was."""

    def answer_positions(self, request: TraceRequest) -> list[int]:
        """Token counts at which computing the answer leaves a state."""

    def credit(self, request: TraceRequest, position: int, start: int) -> float:
        """Worth of a state at `position` of a request that began at `start`; a paged block is worth
        1. Equal worth for everything is plain LRU."""


@dataclass(frozen=True)
class Aligned:
    """A state at the block boundary where a scheduled chunk ends, and at the last ones of prompt
    and answer."""

    sizes: Sizes
    step_tokens: int = STEP_TOKENS
    name: str = "aligned"

    def prompt_positions(self, request: TraceRequest, start: int, diverged: int) -> list[int]:
        unit = self.sizes.unit
        last = request.num_prompt // unit * unit
        step = self.step_tokens // unit * unit
        return [*range(start // unit * unit + step, last, step), *([last] if last > start else [])]

    def answer_positions(self, request: TraceRequest) -> list[int]:
        return _boundaries(request.num_prompt, request.num_computed, self.sizes.unit)

    def credit(self, request: TraceRequest, position: int, start: int) -> float:
        return 1.0


@dataclass(frozen=True)
class EveryBlock:
    """A state at every block boundary."""

    sizes: Sizes
    name: str = "every block"

    def prompt_positions(self, request: TraceRequest, start: int, diverged: int) -> list[int]:
        return _boundaries(start, request.num_prompt, self.sizes.unit)

    def answer_positions(self, request: TraceRequest) -> list[int]:
        return _boundaries(request.num_prompt, request.num_computed, self.sizes.unit)

    def credit(self, request: TraceRequest, position: int, start: int) -> float:
        return 1.0


class Eviction(enum.Enum):
    """What the exact policy's eviction weighs."""

    LRU = "exact, plain LRU"
    #: as the engine, but the end of a prompt is worth its tokens like any other checkpoint
    PROMPT_ENDS_ALIKE = "exact, prompt ends alike"
    ENGINE = "exact"


@dataclass(frozen=True)
class Exact:
    """The engine's positions."""

    sizes: Sizes
    policy: CheckpointPolicy
    eviction: Eviction

    @property
    def name(self) -> str:
        return self.eviction.value

    def prompt_positions(self, request: TraceRequest, start: int, diverged: int) -> list[int]:
        return self.policy.positions(start, request.num_prompt, request.marks, diverged)

    def answer_positions(self, request: TraceRequest) -> list[int]:
        return [request.num_computed]

    def credit(self, request: TraceRequest, position: int, start: int) -> float:
        if self.eviction is Eviction.LRU:
            return 1.0
        num_prompt = request.num_prompt if self.eviction is Eviction.ENGINE else 0
        return self.policy.credit(position, start, num_prompt, self.sizes.state_bytes)


def _boundaries(start: int, end: int, unit: int) -> list[int]:
    """Multiples of `unit` in `(start, end]`."""
    return list(range(start // unit * unit + unit, end + 1, unit))


# ---- policies of the benchmark model -----------------------------------------------------------


def policies(config: VllmConfig | None = None, step_tokens: int = STEP_TOKENS) -> list[Policy]:
    """All that are compared, with the bytes of a configuration's model (Qwen3.5-4B)."""
    config = config or EngineArgs(model=str(MODEL)).create_engine_config()
    groups = explain(config, lengths=[1], what_ifs=False).groups
    state = next(g for g in groups if g.bytes_per_sequence is not None)
    paged = next(g for g in groups if g.tokens_per_block is not None)
    assert paged.tokens_per_block is not None
    ours = Sizes(paged.tokens_per_block, paged.stride_bytes, state.stride_bytes)
    engine = CheckpointPolicy(ours.unit, ours.block_bytes)
    per_token = paged.data_bytes // paged.tokens_per_block
    per_layer = per_token // paged.layers
    page = state.data_bytes // state.layers
    return [
        Aligned(_upstream_sizes(per_token, per_layer, page, 16, state.layers), step_tokens),
        EveryBlock(_upstream_sizes(per_token, per_layer, page, CHUNK, state.layers)),
        *(Exact(ours, engine, eviction) for eviction in Eviction),
    ]


def _upstream_sizes(per_token: int, per_layer: int, page: int, align: int, layers: int) -> Sizes:
    """Pages of one size: an attention block holds the tokens that weigh as much as one state."""
    unit = align * math.ceil(page / (align * per_layer))
    return Sizes(unit, unit * per_token, unit * per_layer * layers)
