# SPDX-License-Identifier: Apache-2.0
"""What drafters with layers of their own have in common: memory, and graphs of what they launch.

A step that replays a whole graph of the model replays one of the drafter, too, for equally many
decodes; it reads the step's arrays, which lie at fixed addresses. Other steps run eagerly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Generic

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.kernels.step import Progress
from vllm.v1.spec_decode.draft_loop import DraftLoop, layer_names
from vllm.v1.spec_decode.drafter import Drafter, DrafterMemory, DraftStep, S
from vllm.v1.worker.graph_plan import GraphPlan
from vllm.v1.worker.graph_set import GraphSet, Prepare
from vllm.v1.worker.step_inputs import StepInputs


class LayerDrafter(Drafter[S], Generic[S]):
    """Subclasses build the model and say how it drafts."""

    #: whether layers run (`_keep`) after a step for which nothing is drafted
    runs_without_drafts: ClassVar[bool] = True

    def __init__(self, vllm_config: VllmConfig, settings: S, progress: Progress) -> None:
        super().__init__(vllm_config, settings, progress)
        self.device = progress.tokens.device
        longest = vllm_config.model_config.max_model_len
        self.loop = DraftLoop(progress, longest, self.tokens_at_once)
        self._layer_names: list[str] = []
        #: by width of the decodes and number of drafts
        self._graphs: dict[tuple[int, int], GraphSet] = {}

    def num_passes(self, num_drafts: int) -> int:
        """One per draft: each is an input of the next."""
        return num_drafts

    @property
    def attn_layer_names(self) -> Sequence[str]:
        return self._layer_names

    # ---- what differs --------------------------------------------------------------------------

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a request that the layers run at a time after a step's."""
        return 1

    @abstractmethod
    def _new_model(self, target: nn.Module) -> nn.Module:
        """The drafter's model with uninitialised weights."""

    def _take(self, step: DraftStep) -> None:
        """Write what `_draft` reads of the step and a graph does not make itself."""
        return

    @abstractmethod
    def _draft(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        """Run the layers over the step's tokens and keep `num_drafts` drafts of its requests (see
        `DraftLoop.keep`), inside the step's forward context. Returns them, `[requests, drafts]`."""

    def _keep(self, inputs: StepInputs) -> None:
        """Where nothing is drafted: leave in the layers' state what `_draft` leaves there of the
        step's tokens."""
        return

    # ---- start-up ------------------------------------------------------------------------------

    def build_model(self, target: nn.Module) -> nn.Module:
        model = self._new_model(target).eval().requires_grad_(False)
        self._layer_names = layer_names(model)
        return model

    def bind(self, memory: DrafterMemory) -> None:
        self._memory = memory
        self._graphs.clear()
        self.loop.bind(memory, self._layer_names)

    def graph_sets(
        self, plan: GraphPlan, new_set: Callable[[list[int], Prepare], GraphSet]
    ) -> Sequence[GraphSet]:
        """Of the steps that repeat: those that draft as many as they have verified. A step after
        which another width begins runs eagerly."""
        kinds = [(width, width - 1) for width in plan.widths if width > 1]
        if self.runs_without_drafts:
            kinds.append((1, 0))
        self._graphs = {
            kind: new_set(plan.decode_sizes_of(kind[0]), partial(self._padded, *kind))
            for kind in kinds
            if plan.decode_sizes
        }
        return list(self._graphs.values())

    def _padded(self, width: int, num_drafts: int, size: int) -> Callable[[], Tensor]:
        """Uploads a step of `size` padded decodes; the result drafts for them."""
        builder, memory = self._memory.inputs, self._memory
        order, inputs = builder.padding(size * width, size, width)
        context = memory.metadata.of_padding(inputs)
        builder.prepare(order, inputs, memory.block_tables.paged)

        def run() -> Tensor:
            with set_forward_context(context):
                return self._run(inputs, size, num_drafts)

        return run

    def unused(self, num_tokens: int) -> Sequence[Tensor]:
        return (self.loop.spare,)

    # ---- the step ------------------------------------------------------------------------------

    def propose(self, step: DraftStep) -> None:
        self._take(step)
        num_drafts = 0 if step.sampled is None else step.num_drafts
        graphs = self._graphs.get((step.order.width, num_drafts))
        size = len(step.inputs.seq_lens)
        if graphs is not None and step.order.decode_only and step.inputs.replays:
            # Where the model's graph was in pieces, as many requests as there are.
            if graphs.size_for(size) == size and size * step.order.width == step.inputs.num_padded:
                graphs.replay(size)
                return
        self._run(step.inputs, step.order.num_reqs, num_drafts)

    def _run(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        """All drafts, `[requests, drafts]`."""
        if num_drafts:
            return self._draft(inputs, num_reqs, num_drafts)
        self._keep(inputs)
        self.loop.keep_none()
        return torch.empty(num_reqs, 0, dtype=torch.int64, device=self.device)
