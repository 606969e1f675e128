# SPDX-License-Identifier: Apache-2.0
"""What a model can do beyond plain generation, declared by its bases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sequence import IntermediateTensors

if TYPE_CHECKING:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class VllmModel(Protocol):
    """What the engine calls on every model, besides `torch.nn.Module`.

    The constructor takes `(*, vllm_config, prefix="")`.
    """

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, hidden]`."""

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Final hidden states `[tokens, hidden]`, or `(hidden, [streams])`: `SupportsEagle3`."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """`[n, hidden] -> [n, vocab]`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint's tensors; returns the names of the parameters that got a value."""


class HasInnerState:
    """Keeps recurrent state between steps."""


class IsHybrid:
    """Mixes attention with recurrent layers; says the recurrent layers' state from a config."""

    is_hybrid: ClassVar[Literal[True]] = True

    @classmethod
    @abstractmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes of one sequence's states in one layer and one tensor-parallel rank."""

    @classmethod
    @abstractmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Element types, in the order of the shapes."""


class SupportsPP:
    """Can run as pipeline stages: built by `make_layers`, it returns `IntermediateTensors` on all
    but the last and takes them on all but the first."""

    @abstractmethod
    def stage_streams(self) -> tuple[int, int]:
        """How many tensors `[tokens, hidden]` this stage takes from the one before, and gives to
        the next, once the streams to capture are chosen."""


class LeavesOutLayers:
    """Can run steps whose outcome nobody needs without the layers that launch what others do."""

    @abstractmethod
    def repeated_layers(self) -> frozenset[int]:
        """The layers that launch nothing but what others do, as the model is now."""

    @abstractmethod
    def leaving_out(self, layers: frozenset[int]) -> AbstractContextManager[None]:
        """Inside the block a step does not run these."""


class HasPlacements:
    """A supernet: layers have several token mixers each, of which one is used."""

    @abstractmethod
    def get_layer_mixers(self) -> dict[int, tuple[str, ...]]:
        """The names of the mixers, of each layer that has several."""

    def get_mixer_names(self) -> tuple[str, ...]:
        """Every name that a layer with several mixers has, () without one. Layers of a thinned
        supernet have some of them each."""
        return tuple(dict.fromkeys(chain(*self.get_layer_mixers().values())))

    @abstractmethod
    def get_layer_placements(self) -> dict[int, str]:
        """The mixer in use, of each layer that has several."""

    @abstractmethod
    def set_layer_placements(self, placement: Sequence[str] | str) -> dict[int, str]:
        """Use these mixers from the next step on, one name per layer (layers with one mixer ignore
        theirs) or a short form (`vllm.model_executor.placements`); returns them by layer.

        `VLLMValidationError` for a mixer that a layer has not, or another number of layers;
        nothing is changed then.
        """

    @abstractmethod
    def spell(self, placement: Mapping[int, str] | Sequence[str] | str) -> str:
        """A placement, in whatever form, as names joined by commas: equal ones give equal text.
        `_` stands for a layer with one mixer. Raises as above."""

    @abstractmethod
    def get_mixers(self) -> list[nn.Module]:
        """All mixers of the layers that have several."""

    @abstractmethod
    def get_used_mixers(self) -> dict[int, nn.Module]:
        """The mixer in use itself, of each layer that has several."""

    @abstractmethod
    def unused_mixers(self, *placements: Sequence[str] | str) -> list[nn.Module]:
        """The mixers that no layer uses in any of these placements, or now if none is given; raises
        as above."""


class SharesVocabulary:
    """Can leave the logits of a shared vocabulary with the ranks that compute them."""

    @property
    @abstractmethod
    def output_head(self) -> VocabParallelEmbedding:
        """The head, or the embedding that is tied to it."""

    @abstractmethod
    def own_logits(self, hidden_states: Tensor) -> Tensor:
        """This rank's part of what `compute_logits` gathers: `[n, hidden] -> [n, rows of the
        head]`, those of padding, too."""


class LoadsPart:
    """Has its tensors in a checkpoint beside those of other models, or of other stages."""

    @property
    def is_part(self) -> bool:
        """Whether there may be tensors that are not wanted."""
        return True

    @abstractmethod
    def wants(self, name: str) -> bool:
        """Whether the checkpoint tensor of this name belongs to the model; it gets no other."""

    def leave_out(self, names: Sequence[str]) -> None:
        """These are not wanted, and nobody reads them; a model may record why."""


class Dequantises:
    """Makes weights of quantised checkpoints 16-bit itself while it loads them."""

    #: `quant_method` of such checkpoints
    dequantised_methods: ClassVar[tuple[str, ...]]


class EagleModelMixin:
    """Lets a decoder return its residual stream at chosen depths.

    Id k is the stream after k layers: 0 the embeddings, `num_layers` the last layer's output
    before the final norm.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()

    def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_hidden_state_layers = tuple(layers)

    def _maybe_add_hidden_state(
        self,
        aux_hidden_states: list[Tensor],
        layer_idx: int,
        hidden_states: Tensor,
        residual: Tensor | None,
    ) -> list[Tensor]:
        """Append `hidden_states (+ residual) [tokens, hidden]` once per request for `layer_idx`."""
        count = self.aux_hidden_state_layers.count(layer_idx)
        if count:
            value = hidden_states if residual is None else hidden_states + residual
            aux_hidden_states.extend([value] * count)
        return aux_hidden_states


class SupportsEagle3:
    """Returns residual streams: `forward` gives `(hidden, [one per id])` once ids are set."""

    @abstractmethod
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Choose the ids; raises ValueError for one outside `0 .. num_layers`."""

    @abstractmethod
    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Ids of a draft model that names none."""


def as_stage(model: nn.Module) -> SupportsPP:
    """The model as a pipeline stage; `VLLMValidationError` for one that cannot be any."""
    reason = ""
    if not isinstance(model, SupportsPP):
        reason = f"{type(model).__name__} is not made for them (SupportsPP)"
    elif isinstance(model, HasPlacements) and model.get_mixer_names():
        reason = "the model is a supernet, whose placement would change in all at once"
    else:
        return model
    raise VLLMValidationError(
        f"--pipeline-parallel-size: {reason}; use --tensor-parallel-size instead",
        "pipeline_parallel_size",
    )
