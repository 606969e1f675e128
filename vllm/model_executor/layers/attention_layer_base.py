# SPDX-License-Identifier: Apache-2.0
"""What every layer that keeps state offers the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from vllm.compilation.graph_break import graph_break, recording_piece
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import (
    connector_acts_on_every_layer,
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.forward_context import get_forward_context
from vllm.kernels.journal import Journal, JournalShape, JournalStack
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec


class AttentionLayerBase(ABC):
    """A layer with state: says what it keeps and how its metadata is built.

    A layer sets its `layer_name`, unique in the model. The engine collects the layers of the built
    model (`state_layers`), groups them by spec, allocates memory and binds each one's view to
    `kv_cache` before the first forward.
    """

    #: see above; the engine refuses a layer that has none
    layer_name: str = ""
    kv_cache: Any = None
    #: whether all the layer reads of its metadata in a padded step lies at fixed addresses and has
    #: a fixed size, so that a graph may hold what reads it
    reads_fixed_addresses: ClassVar[bool] = False
    #: kernels of a decode beside projections, about: for predictions, as `decode_flops_per_element`
    decode_launches: ClassVar[int] = 1
    #: of how many tokens, the newest or others, a decode reads what is kept; None: of all
    decode_tokens: int | None = None

    @property
    def decode_flops_per_element(self) -> float:
        """FLOPs of a decode per element of state that it reads."""
        return 2.0

    def metadata(self) -> Any:
        """This layer's batch metadata in the running step.

        RuntimeError inside a piecewise graph, which would keep the metadata of its capture.
        """
        if recording_piece() and not self.reads_fixed_addresses:
            raise RuntimeError(
                f"layer {self.layer_name} reads the batch's metadata inside a piecewise graph; "
                "decorate what does with vllm.compilation.graph_break, or set cudagraph_mode to "
                "FULL_DECODE_ONLY"
            )
        return get_forward_context().attn_metadata[self.layer_name]

    def with_connector(self, run: Callable[..., None], *args: object) -> None:
        """`run(*args)`, which touches the cache, after a connector's load and before its save.

        Only where a connector acts on every layer this is a graph break; tensors among `args` then
        have fixed addresses.
        """
        if connector_acts_on_every_layer():
            self._load_run_save(run, *args)
        else:
            run(*args)

    @graph_break
    def _load_run_save(self, run: Callable[..., None], *args: object) -> None:
        metadata = self.metadata()
        maybe_wait_for_layer_load(self.layer_name)
        run(*args)
        maybe_save_kv_layer(self.layer_name, self.kv_cache, metadata)

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What the layer keeps."""

    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend whose metadata the layer reads."""


class KeepsJournal(AttentionLayerBase):
    """A recurrent layer whose decode steps can leave their updates of the state in a ring.

    `journal` is bound with the memory; None: every step writes the state back.
    """

    journal: Journal | None = None
    #: heads of the keys that a token leaves there, in this shard
    journal_key_heads: int
    #: see `JournalShape`
    channel_decay: ClassVar[bool] = False
    element_decay: ClassVar[bool] = False

    def journal_shape(self, spec: MambaSpec) -> JournalShape:
        """What a token takes in the ring; `spec` is the layer's: a convolution and a state.

        ValueError for other states: their layers have no journal, or override this.
        """
        if [len(shape) for shape in spec.shapes] != [2, 3]:
            raise ValueError(
                f"{type(self).__name__} keeps {spec.contents}; a journal is for a convolution's "
                "inputs [inputs, channels] and a state [heads, head_v_dim, head_k_dim]: leave "
                "KeepsJournal out, and drafts with it"
            )
        (_, channels), (heads, head_v_dim, head_k_dim) = spec.shapes
        conv_dtype, state_dtype = spec.dtypes
        return JournalShape(
            self.journal_key_heads,
            heads,
            head_k_dim,
            head_v_dim,
            state_dtype,
            channels,
            conv_dtype,
            self.channel_decay,
            self.element_decay,
        )

    def journal_log_rates(self) -> Tensor | None:
        """`Journal.log_rates`; None where a token keeps its decays."""
        return None

    @staticmethod
    @abstractmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        """Write what layers of this kind have pending to their blocks, with the bits of their
        decodes: see `gdn_commit`."""
