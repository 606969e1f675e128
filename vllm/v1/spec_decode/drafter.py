# SPDX-License-Identifier: Apache-2.0
"""What a drafter is: the part of a step that proposes tokens after each row's newest one.

A drafter is chosen by `speculative_config.method` (`vllm.config.draft_methods`) and lives in the
model runner. It works on the step's stream and never waits for the device: how many drafts were
accepted, and so which token is a row's newest, only the device knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.config.draft_methods import DRAFT_METHODS
from vllm.config.draft_methods.base import DraftSettings
from vllm.kernels.step import Progress
from vllm.utils.class_registry import resolve_class
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet, Prepare
from vllm.v1.worker.input_batch import RequestState, StepOrder
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs
from vllm.v1.worker.step_metadata import StepMetadata

S = TypeVar("S", bound=DraftSettings)


@dataclass(frozen=True)
class DraftStep:
    """The step that has just run, its samples accepted (`Progress` is past them).

    `inputs` has ids, positions, slots and lengths of the tokens that the target ran, at fixed
    addresses. The requests that sampled are `order.sampled`; of those `inputs.sample_requests
    [k, 4]` int32 says (`AcceptProblem`) batch row, first sample, samples; `sampled [samples]` int64
    are the tokens, and `counts [k]` int32 how many of each request's are output: its accepted
    drafts and the token after them. Both are None where no request samples (a prompt's chunk).

    `num_drafts`: drafts that the next steps can verify per row, any number of the policy's ladder,
    whatever this step verified. With 0 a drafter brings its state up to date (its layers' keys, its
    history) and proposes nothing.
    """

    order: StepOrder
    inputs: StepInputs
    sampled: Tensor | None
    counts: Tensor | None
    num_drafts: int


@dataclass(frozen=True)
class DrafterMemory:
    """The state memory of the layers, the drafter's among them, and what makes their metadata and
    the arrays of a step."""

    kv_cache_config: KVCacheConfig
    block_tables: BlockTables
    metadata: StepMetadata
    inputs: StepInputBuilder


class Drafter(ABC, Generic[S]):
    """Base of all drafters; `settings` are the method's own.

    A drafter writes `progress.tokens[:, 1:]` and `progress.num_drafts` (0 where it has nothing to
    propose for a row) in `propose`, and nowhere else: the host has heard of them by then, and fills
    the masks of rows that follow a grammar by what it has heard. Proposals may be anything that
    follows from what the device knows, also from the sampler's noise: the target samples every
    position itself, with its own noise, and a draft is accepted if it is that sample. The text is
    that without a drafter.

    In the order in which a runner calls: `build_model`, `load_weights`, `bind`, `rehearse` and
    `graph_sets` at start-up; `add` before a request's first step, `observe` and `propose` in every
    step, `remove` after its last. `bind` and `graph_sets` come again after a sleep.
    """

    def __init__(self, vllm_config: VllmConfig, settings: S, progress: Progress) -> None:
        self.vllm_config = vllm_config
        self.settings = settings
        self.progress = progress

    @property
    def residual_layer_ids(self) -> tuple[int, ...]:
        """Which residual streams `observe` gets, ascending: id k is the stream after k layers."""
        return ()

    def num_passes(self, num_drafts: int) -> int:
        """How often a step that makes so many drafts per request reads the drafter's weights."""
        return 0

    @property
    def attn_layer_names(self) -> Sequence[str]:
        """Layers with state that `propose` runs: their metadata is made in every step, also where
        the target's layers run in a graph that needs none."""
        return ()

    def unused(self, num_tokens: int) -> Sequence[Tensor]:
        """Parts of the memory that it keeps, bound already, which nobody reads after a step of so
        many tokens: rows of padding may leave anything in them."""
        return ()

    # ---- start-up ------------------------------------------------------------------------------

    def build_model(self, target: nn.Module) -> nn.Module | None:
        """The drafter's own modules on the current device (`meta` in an outline), which may share
        the target's; None without any. Layers with state are found in them and get memory in
        groups of the arena, so their names must differ from the target's.
        """
        return None

    def load_weights(self) -> None:
        """Fill the drafter's parameters; the target's are there already."""
        return

    def bind(self, memory: DrafterMemory) -> None:
        """The layers have got their memory; nothing of any request is in it."""
        return

    def rehearse(self) -> None:
        """Launch kernels that steps of made-up requests do not (warm-up)."""
        return

    def graph_sets(
        self, plan: GraphPlan, new_set: Callable[[list[int], Prepare], GraphSet]
    ) -> Sequence[GraphSet]:
        """Graphs of the drafter's own launches. The runner captures them with the model's, at
        start-up or later; the drafter keeps them and replays what is captured (`size_for`)."""
        return ()

    # ---- requests ------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """A request has its row, with the tokens that the host knows, or has it again."""
        return

    def remove(self, state: RequestState) -> None:
        """A request leaves its row."""
        return

    # ---- the step ------------------------------------------------------------------------------

    def observe(self, inputs: StepInputs, hidden: Tensor, residual: Sequence[Tensor]) -> None:
        """Inside the model's forward pass, so it is recorded in graphs: keep what `propose` needs
        at fixed addresses. `hidden [tokens, hidden]` after the final norm, `residual` one
        `[tokens, hidden]` per id; tokens with padding.
        """
        return

    @abstractmethod
    def propose(self, step: DraftStep) -> None:
        """After every step, inside its forward context (so the drafter's layers find their
        metadata for the tokens that the target ran), chunks of prompts included."""
        raise NotImplementedError


def create_drafter(vllm_config: VllmConfig, progress: Progress) -> Drafter[Any] | None:
    """The configured drafter, without its model; None if there is none."""
    settings = vllm_config.drafter
    if settings is None:
        return None
    drafter_class: type[Drafter[Any]] = resolve_class(DRAFT_METHODS[settings.method].drafter)
    return drafter_class(vllm_config, settings, progress)


def attach_drafter(drafter: Drafter[Any], target: nn.Module) -> list[nn.Module]:
    """Build the drafter's model beside `target`: the modules in which there may be layers with
    state."""
    model = drafter.build_model(target)
    return [] if model is None else [model]
