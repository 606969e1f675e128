# SPDX-License-Identifier: Apache-2.0
"""What the engine asks a connector's class before it makes an instance: with which models, layouts
and requests it works, and what it takes. The two properties are asked of an instance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_cache_interface import ArenaPlan
    from vllm.v1.request import Request


@dataclass(frozen=True)
class StateTier:
    """Memory behind the arena: `num_pages` pages of the arena's size."""

    name: str
    num_pages: int


class SupportsHMA(ABC):
    """A connector that can work with several state groups at once."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`KVConnectorBase_V1.request_finished` with one block list per group."""


class ConnectorCapabilities:
    """The answers of a connector that says nothing else."""

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether this class, configured like this, can work with several state groups."""
        return issubclass(cls, SupportsHMA)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether one tensor over all layers suits this connector better than one per layer."""
        return False

    @property
    def takes_arena(self) -> bool:
        """Whether this connector moves whole blocks of the arena, all layers of a group at once."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the per-layer calls must also happen in steps that replay a graph."""
        return False

    @classmethod
    def acts_on_every_layer(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the per-layer calls do anything for layers that compute with their cache.

        False: only layers that keep captured hidden states make them, and graphs hold the others.
        """
        return True

    @classmethod
    def reads_recurrent_state(cls, extra_config: dict[str, Any]) -> bool:
        """Whether it reads state blocks of running requests on recurrent layers, in any step."""
        return True

    @classmethod
    def loads_drafter_rows(cls, kv_transfer_config: KVTransferConfig, num_ahead: int) -> bool:
        """Whether this class, configured like this, loads what drafters that read the target keep:
        the rows of their layers, which make no per-layer calls, each compared by the `num_ahead`
        tokens after its own, too, on which it depends (`KVCacheSpec.num_lookahead_tokens`)."""
        return False

    @classmethod
    def supports_pipeline_stages(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether this class, configured like this, works where each worker has a part of the
        layers: groups without layers there, and other bytes in a page than elsewhere."""
        return False

    @classmethod
    def supports_several_hosts(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether this class, configured like this, works where workers are on several hosts: a
        worker's files are those of its host, and nobody else knows its addresses."""
        return True

    @classmethod
    def state_tiers(
        cls, kv_transfer_config: KVTransferConfig, plan: ArenaPlan, num_ranks: int
    ) -> list[StateTier]:
        """Memory behind the arena that this connector, configured like this, will use on each of
        `num_ranks` workers; for `vllm explain`."""
        return []

    @classmethod
    def device_bytes(cls, kv_transfer_config: KVTransferConfig, device_type: str) -> int:
        """Device memory that a worker's connector, configured like this, will allocate itself: the
        arena gets so much less, unless its size is given."""
        return 0

    @classmethod
    def check_request(
        cls, kv_transfer_config: KVTransferConfig, params: dict[str, Any], num_completions: int
    ) -> None:
        """ValueError for a request's `kv_transfer_params` that cannot be honoured.

        Called before the engine sees the request; the client gets the message with a 400.
        """
        return
