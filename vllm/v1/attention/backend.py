# SPDX-License-Identifier: Apache-2.0
"""Interface between the runner, the metadata builders and the layers that keep state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.worker.staging import Uploads


class AttentionMetadata:
    """Base of what a layer reads about the batch; one object per state group and step."""


M = TypeVar("M", bound=AttentionMetadata)


@dataclass
class CommonAttentionMetadata(AttentionMetadata):
    """The batch as every group sees it, plus this group's blocks.

    Requests are ordered decodes first (`decode_width` tokens, some context), then prefills. Tensors
    are on the device, `_cpu` arrays are their host twins (numpy; upper bounds where drafts are
    verified); all counts are host integers.
    Padding rows (graph replay) lie past `num_tokens`/`num_reqs` with slot and block id -1.
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # [num_reqs + 1] int32
    query_start_loc_cpu: np.ndarray
    seq_lens: Tensor  # [num_reqs] int32, context including this step's tokens
    seq_lens_cpu: np.ndarray
    num_computed_tokens_cpu: np.ndarray  # [num_reqs]
    #: `[num_prefills + 1]` int32, relative to the first prefill token
    prefill_query_start_loc: Tensor
    prefill_query_start_loc_cpu: np.ndarray
    block_table: Tensor  # [num_reqs, max_blocks] int32
    #: the prefills' rows of `seq_lens` and `block_table`, at an address that does not depend on the
    #: number of decodes: kernels are compiled for the alignment of what they are given
    prefill_seq_lens: Tensor
    prefill_block_table: Tensor
    slot_mapping: Tensor  # [num_tokens] int64; empty for recurrent groups
    block_table_cpu: np.ndarray  # [num_reqs, max_blocks]
    #: tokens of the graph that the step replays; None: it runs eagerly
    padded_tokens: int | None = None
    decode_width: int = 1

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_width


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Makes a group's metadata once per step; host integers only, uploads are asynchronous.

    What the device's tensors hold in the step is copied to them after `build`.
    """

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    def share_uploads(self, uploads: Uploads) -> None:
        """Called once: from now on these are flushed after every `build`, so staged arrays may
        travel with them."""

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> M:
        """Metadata for one step."""


class AttentionBackend(ABC):
    """A way to run one kind of layer; a class, never instantiated."""

    name: ClassVar[str]
    #: whether decodes can run inside a captured graph
    supports_full_graph: ClassVar[bool] = False
    #: whether metadata needs each sequence's length on the host, where drafts make it a bound
    plans_on_host: ClassVar[bool] = False
    #: most prefills of a step whose layers are part of a piecewise graph; None: they run between
    max_prefills_in_graph: ClassVar[int | None] = None
    #: whether keys and values may be e4m3; then the implementation reads its `cache_scales`, which
    #: the layer sets
    supports_fp8_cache: ClassVar[bool] = False
    #: whether the implementation takes attention sinks into account, which the layer sets
    supports_sinks: ClassVar[bool] = False
    #: whether the implementation takes another `sliding_window` than None
    supports_sliding_window: ClassVar[bool] = False
    #: whether the implementation reads its `rows`, which the layer sets; without, they are tokens
    supports_row_blocks: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]: ...

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """What runs one layer's attention, where an `Attention` layer asks; others call the kernels
        themselves."""
        raise NotImplementedError("this backend has no attention implementation")
