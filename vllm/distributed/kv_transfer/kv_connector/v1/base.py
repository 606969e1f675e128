# SPDX-License-Identifier: Apache-2.0
"""The connector interface.

A connector has two separate instances, usually in different processes. The scheduler-side one
decides (what to load, what to save, when blocks may be freed) and sends its decisions in
`KVConnectorMetadata`; the worker-side one moves the bytes. Order of the calls in a step:

- scheduler: `get_num_new_matched_tokens` and `update_state_after_alloc` for each waiting request,
  `build_connector_meta` at the end of every `schedule()`; `request_finished` (one state group) or
  `request_finished_all_groups` once per finished or aborted request; `update_connector_output`
  with what the workers report;
- worker: `handle_preemptions`, `will_read_recurrent_state`, `bind_connector_metadata`,
  `start_load_kv`, per layer `wait_for_layer_load` and `save_kv_layer`, then `wait_for_save`,
  `get_finished`, `get_blocks_with_load_errors`, `get_block_ids_with_load_errors`,
  `take_failed_requests`, statistics and events, `clear_connector_metadata`. A step without tokens
  has no layer calls and no `wait_for_save`; with nothing to do but to wait for transfers it calls
  `wait_for_transfers` before `get_finished`, which returns once `transfer_ended` was called.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.capabilities import (
    ConnectorCapabilities,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.messages import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
    from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import RequestError
    from vllm.v1.kv_cache_interface import ArenaPlan, KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True)
class StateMemory:
    """A worker's state memory in every form a connector may ask for.

    `arena`: `uint8 [num_pages * page_bytes]`, laid out by `plan`. `layers`: layer name -> its view
    of it. `cross_layers`: `[num_blocks, layers, ...]` and the layers' backend, for models with one
    kind of attention layer only.
    """

    arena: Tensor
    plan: ArenaPlan
    layers: dict[str, Tensor]
    cross_layers: tuple[Tensor, type[AttentionBackend]] | None = None


#: `(src_caches, dst_caches, src_block_ids, dst_block_ids, direction)`
CopyBlocksOp = Callable[
    [dict[str, Tensor], dict[str, Tensor], list[int], list[int], Literal["h2d", "d2h"]], None
]


class KVConnectorRole(enum.Enum):
    """Which of the two instances this is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase_V1(ConnectorCapabilities, ABC):
    """Base of all connectors: what the engine calls, beside what it asks (`ConnectorCapabilities`).

    Raises ValueError without `vllm_config.kv_transfer_config`.
    """

    #: the connector's statistics, and what shows them at `/metrics`; None: it has none
    stats_class: ClassVar[type[KVConnectorStats] | None] = None
    metrics_class: ClassVar[type[KVConnectorPromMetrics] | None] = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError(
                f"{type(self).__name__} needs vllm_config.kv_transfer_config, which is None"
            )
        self._connector_metadata: KVConnectorMetadata | None = None
        self._transfers_ended = threading.Event()
        self._vllm_config = vllm_config
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """`"NHD"`, `"HND"` or None for no demand."""
        if cls is KVConnectorBase_V1:
            raise TypeError("get_required_kvcache_layout is asked of a connector, not of the base")
        return None

    # ---- worker side ---------------------------------------------------------------------------

    @property
    def can_leave_memory(self) -> bool:
        """Whether it goes on with other state memory: see `leave_memory`."""
        return False

    def leave_memory(self, kv_cache_config: KVCacheConfig) -> None:
        """On both sides, with no request left and no transfer under way, if `can_leave_memory`: the
        state memory is given up, nothing may refer to it, and there will be another. On the worker
        `register_memory` hands that over."""
        raise RuntimeError(f"{type(self).__name__} stays with its state memory")

    def register_memory(self, memory: StateMemory) -> None:
        """Called after allocation: hands the state memory over in the form asked for."""
        if self.takes_arena:
            self.register_arena(memory.arena, memory.plan)
        elif self.prefer_cross_layer_blocks and memory.cross_layers is not None:
            self.register_cross_layers_kv_cache(*memory.cross_layers)
        else:
            self.register_kv_caches(memory.layers)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:  # noqa: B027
        """Layer name -> its cache."""

    def register_cross_layers_kv_cache(  # noqa: B027
        self, kv_cache: Tensor, attn_backend: type[AttentionBackend]
    ) -> None:
        """`kv_cache [num_blocks, layers, ...]`, instead of `register_kv_caches`: when
        `prefer_cross_layer_blocks`, for a model of one kind of attention layer."""

    def register_arena(self, arena: Tensor, plan: ArenaPlan) -> None:  # noqa: B027
        """`arena`, `uint8 [num_pages * page_bytes]`, instead of `register_kv_caches`: when
        `takes_arena`. Block `b` of group `g` begins at byte `b * plan.block_stride(g)` and holds
        `plan.groups[g].block_bytes` bytes, all layers of the group. The memory may be given up and
        come back elsewhere while the engine sleeps: keep the tensor, not its address."""

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:  # noqa: B027
        """How to copy blocks between the device and host buffers."""

    def handle_preemptions(  # noqa: B027
        self, kv_connector_metadata: KVConnectorMetadata
    ) -> None:
        """Every step, before the metadata is bound and before freed blocks are overwritten.

        All earlier steps were launched, and the states of requests that ended or were preempted are
        complete in stream order.
        """

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "no connector metadata is bound"
        return self._connector_metadata

    def will_read_recurrent_state(self, connector_metadata: KVConnectorMetadata) -> bool:
        """Whether it reads state blocks of running requests in the step with this metadata, which
        is not bound yet, or before the next step's layers run.

        Where it does, each decode step writes the state with the token it computes to its block,
        and the states of requests that do not run are complete, too. Else a block may lack the
        newest tokens.
        """
        extra_config = self._kv_transfer_config.kv_connector_extra_config
        return self.reads_recurrent_state(extra_config)

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start loading; may run while the first layers compute."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when this layer's loaded state is in its cache (in stream order)."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Start saving from a layer's cache, `kv_layer [num_blocks, ...]`."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the cache may be overwritten (in stream order)."""

    def transfer_ended(self) -> None:
        """Call this, from any thread, when a transfer has ended that the next reports can tell of:
        `get_finished`, load errors, `build_connector_worker_meta`. A step that waits goes on."""
        self._transfers_ended.set()

    def share_transfers_ended(self, event: threading.Event) -> None:
        """From here on `transfer_ended` sets `event`, for which somebody else waits."""
        self._transfers_ended = event

    def wait_for_transfers(self, timeout_s: float) -> None:
        """In a step that has nothing to compute: return when a transfer has ended that the step's
        reports can tell of, after `timeout_s` at the latest. Of a connector among others only
        `transfer_ended` counts, and this is not called."""
        self._transfers_ended.wait(timeout_s)

    def begin_reports(self) -> None:
        """Before a step's reports are asked for: what ended until now is in them."""
        self._transfers_ended.clear()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """`(sending, recving)`: requests whose transfers are complete.

        `finished_req_ids` finished or were aborted before this step.
        """
        return None, None

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        """`(state group, block)` of what should have been loaded and was not: in this step, or
        before `get_finished` reports the request as received."""
        return set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The same without groups: such ids count for the requests that are being loaded."""
        return set()

    def take_failed_requests(self) -> dict[str, RequestError]:
        """Request id -> reason, and forget them: running requests that this connector cannot serve.

        The engine ends each with an error; a `RequestConflict` is the client's own.
        """
        return {}

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None

    def get_kv_connector_kv_cache_events(self) -> Any | None:
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None

    def shutdown(self) -> None:  # noqa: B027
        """Finish outstanding transfers and release everything."""

    # ---- scheduler side ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:  # noqa: B027
        """A request joined the waiting queue."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: B027
        """The allocator's block pool, for connectors that hold blocks by themselves or observe what
        the prefix cache gains and loses (`BlockPool.observers`)."""

    def get_prefix_hash_root(self) -> bytes | None:
        """What hashes of prefixes start from, for a store that outlives the engine; None: any.

        Asked once, before the first request.
        """
        return None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens past `num_computed_tokens` that can be loaded for every group.

        `(None, False)`: ask again later; `(k, True)`: the load runs beside the steps;
        `(k, False)`: the load is part of the step.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated; `num_external_tokens` (may be 0) are this connector's to load."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's message to the workers. Must not change `scheduler_output`."""

    def update_connector_output(  # noqa: B027
        self, connector_output: KVConnectorOutput
    ) -> None:
        """What the workers reported for a step."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Once, before the blocks are freed.

        `(True, params)`: the blocks stay until `get_finished` reports the request as sent;
        `params` goes into the reply as `kv_transfer_params`.
        """
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping for transfers that no request waits for."""
        return False

    def take_events(self) -> Iterable[Any]:
        """`KVCacheEvent`s since the last call."""
        return ()

    def get_finished_count(self) -> int | None:
        """How many workers report a finished transfer; None: all of them."""
        return None

    def set_xfer_handshake_metadata(  # noqa: B027
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Tensor-parallel rank -> what that worker's `get_handshake_metadata` returned."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by `(pipeline rank, tensor-parallel rank)`."""
        self.set_xfer_handshake_metadata({tp: value for (_, tp), value in metadata.items()})

    def reset_cache(self) -> bool | None:
        """Drop what the connector stores, which may be of other weights than what comes; None when
        there is nothing to drop, False when it cannot.

        Loads may be on their way: their requests will not use them, but what they bring must not
        be stored.
        """
        return None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics from their `data` after a way between processes; empty ones without."""
        return None if cls.stats_class is None else cls.stats_class(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """What shows the connector's statistics at `/metrics`; None: nothing does."""
        if cls.metrics_class is None:
            return None
        return cls.metrics_class(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def supports_hma(connector: object) -> bool:
    """Whether a connector class, or a connector as it is configured, handles several groups."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    if isinstance(connector, KVConnectorBase_V1):
        return type(connector).supports_hma_config(connector._kv_transfer_config)
    return isinstance(connector, SupportsHMA)
