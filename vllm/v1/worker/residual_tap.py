# SPDX-License-Identifier: Apache-2.0
"""The target's residual stream at chosen layers, for whoever reads it: a capture, a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.model_executor.models.extract_hidden_states import aux_layer_ids
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.v1.worker.step_inputs import StepInputs


class ResidualReader(Protocol):
    """Reads residual streams of every step, chunks of prompts included."""

    @property
    def residual_layer_ids(self) -> tuple[int, ...]:
        """Which streams `observe` gets: id k is the stream after k layers. Ids may repeat."""
        ...

    def observe(self, inputs: StepInputs, hidden: Tensor, residual: Sequence[Tensor]) -> None:
        """Inside the model's forward pass, so it is recorded in graphs: what outlives the step goes
        to fixed addresses. `hidden [tokens, hidden]` after the final norm; `residual` one
        `[tokens, hidden]` per id, ascending; tokens with padding. All of it is only read.
        """
        ...


class ResidualTap:
    """Asks the target once for all layers that `readers` want, and hands each its own; None among
    the readers stands for one that is not configured.

    Raises ValueError where a target that cannot return its streams should, or has no such layer.
    """

    def __init__(self, target: nn.Module, readers: Sequence[ResidualReader | None]) -> None:
        present = [reader for reader in readers if reader is not None]
        #: ascending, each once
        self.layer_ids = sorted({i for reader in present for i in reader.residual_layer_ids})
        self._readers = [
            (reader, [self.layer_ids.index(i) for i in sorted(reader.residual_layer_ids)])
            for reader in present
        ]
        if self.layer_ids:
            ask_for_streams(target, self.layer_ids)

    def read(self, inputs: StepInputs, output: Tensor | tuple[Tensor, list[Tensor]]) -> Tensor:
        """Show the readers what the target returned; gives its hidden states `[tokens, hidden]`.

        Raises ValueError for another number of streams than the target was asked for.
        """
        hidden, streams = (output, []) if isinstance(output, Tensor) else output
        if len(streams) != len(self.layer_ids):
            raise ValueError(
                f"the target returned {len(streams)} hidden states for layer ids {self.layer_ids}"
            )
        for reader, places in self._readers:
            reader.observe(inputs, hidden, [streams[i] for i in places])
        return hidden


def ask_for_captured_streams(vllm_config: VllmConfig, target: nn.Module) -> None:
    """On a pipeline stage before the last, which captures nothing itself: make `target` hand on
    the streams that are captured, if any are."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_extract_hidden_states():
        ask_for_streams(target, sorted(set(aux_layer_ids(vllm_config))))


def ask_for_streams(target: nn.Module, layer_ids: Sequence[int]) -> None:
    """Make `target` return these streams, ascending; raises as `ResidualTap` does."""
    if not isinstance(target, SupportsEagle3):
        raise ValueError(
            f"{type(target).__name__} cannot return hidden states of its layers "
            "(SupportsEagle3); extract_hidden_states and drafters that read them need a model "
            "that can"
        )
    target.set_aux_hidden_state_layers(tuple(layer_ids))
