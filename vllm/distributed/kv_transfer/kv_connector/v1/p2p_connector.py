# SPDX-License-Identifier: Apache-2.0
"""One engine computes prompts, another answers them; see docs/disaggregation.md.

Any kind of state: whole blocks of the arena move, so nothing here knows what a layer keeps. State
leaves when its request has ended, when the recurrent part is complete, and passes through staging
memory on both sides: its bytes are sealed there before they leave and checked before they enter.
"""

from typing import Any

import torch
from torch import Tensor

from vllm import decisions
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import ArenaConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p import staging_device
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import BlockCopies
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import peer_identity
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import (
    P2pHandshake,
    P2pMetadata,
    P2pPromMetrics,
    P2pStats,
    Place,
    RemoteState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.receiving import Receiver
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.scheduling import (
    Home,
    P2pScheduler,
    asks_to_fetch,
    asks_to_keep,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.sending import Sender
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.settings import P2pSettings
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import (
    HOST,
    Staging,
    staging_device_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging_device import Choice
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.tcp_transport import TcpTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import CannotRegister, Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import MessageServer
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import weights_identity
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ArenaPlan, KVCacheConfig
from vllm.v1.request import Request

#: the decision which memory state passes through
STAGED = "state passes through"


class P2pConnector(ArenaConnector):
    """Settings: `p2p.settings`. This class moves bytes over TCP."""

    stats_class = P2pStats
    metrics_class = P2pPromMetrics
    #: keys of `kv_connector_extra_config` that are the transport's
    transport_keys: tuple[str, ...] = ()

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = P2pSettings.of(self._kv_transfer_config, self.transport_keys)
        # worker side
        self._transport: Transport | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._server: MessageServer | None = None
        self._places: dict[str, list[list[Place]]] = {}
        # scheduler side
        self._scheduling: P2pScheduler
        if role is KVConnectorRole.SCHEDULER:
            self._scheduling = P2pScheduler(self._config)

    def make_transport(self, rank: int) -> Transport:
        """What moves the bytes of this worker."""
        return TcpTransport()

    @classmethod
    def staging_choice(cls, settings: P2pSettings, device_type: str) -> Choice:
        """Where an engine on devices of this type stages state."""
        return Choice(False, "TCP moves bytes of host memory")

    @classmethod
    def device_bytes(cls, kv_transfer_config: KVTransferConfig, device_type: str) -> int:
        settings = P2pSettings.of(kv_transfer_config, cls.transport_keys)
        if not cls.staging_choice(settings, device_type).on_device:
            return 0
        sides = kv_transfer_config.is_kv_producer + kv_transfer_config.is_kv_consumer
        return sides * staging_device_bytes(settings.staging_bytes)

    @classmethod
    def loads_drafter_rows(cls, kv_transfer_config: KVTransferConfig, num_ahead: int) -> bool:
        return num_ahead <= 1  # a producer knows the prompt's last token, which it does not compute

    @classmethod
    def check_request(
        cls, kv_transfer_config: KVTransferConfig, params: dict[str, Any], num_completions: int
    ) -> None:
        fetch, keep = asks_to_fetch(params), asks_to_keep(params)
        if fetch and keep:
            raise ValueError("kv_transfer_params ask for do_remote_prefill and do_remote_decode")
        if (fetch or keep) and num_completions > 1:
            raise ValueError("one state is handed on for one completion: leave out n")
        if keep and not kv_transfer_config.is_kv_producer:
            raise ValueError("kv_transfer_params.do_remote_decode: this engine is a kv_consumer")
        if fetch and not kv_transfer_config.is_kv_consumer:
            raise ValueError("kv_transfer_params.do_remote_prefill: this engine is a kv_producer")
        if fetch:
            remote = RemoteState.of(params)
            settings = P2pSettings.of(kv_transfer_config, cls.transport_keys)
            settings.allowed_peers.check(remote.host, remote.ports)

    @classmethod
    def supports_several_hosts(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Peers are told one host for all ranks."""
        return False

    # ---- worker side ---------------------------------------------------------------------------

    def register_arena(self, arena: Tensor, plan: ArenaPlan) -> None:
        rank = get_tensor_model_parallel_rank()
        settings, transfer = self._settings, self._kv_transfer_config
        transport = self._transport = self.make_transport(rank)
        outgoing, incoming = self._stage(transport, arena, plan)
        copies = BlockCopies(arena, plan)
        identity = peer_identity(self._vllm_config, self._config)
        staging = outgoing or incoming
        assert staging is not None, "an engine is a producer, a consumer or both"
        identity[staging_device.KEY] = staging.buffer.device.type
        if outgoing is not None:
            self._sender = Sender(
                copies,
                outgoing,
                transport,
                transfer.engine_id,
                identity,
                settings.lease_s,
                self.transfer_ended,
            )
            parallel = self._vllm_config.parallel_config
            first = settings.port + parallel.data_parallel_rank * parallel.world_size
            port = first + rank if settings.port else 0
            self._server = MessageServer(settings.host, port, self._sender.handlers())
        if incoming is not None:
            decisions.record(
                "peers that clients may name",
                str(settings.allowed_peers),
                "kv_connector_extra_config.allowed_peers"
                if settings.allowed_peers.given is not None
                else "kv_connector_extra_config has no allowed_peers",
            )
            self._receiver = Receiver(
                copies,
                incoming,
                transport,
                identity,
                rank,
                self._num_ranks,
                settings.timeout_s,
                self.transfer_ended,
            )

    def _stage(
        self, transport: Transport, arena: Tensor, plan: ArenaPlan
    ) -> tuple[Staging | None, Staging | None]:
        """Memory for what leaves and for what comes, where it was chosen to be; the transport knows
        it then. `CannotRegister` where it was required to be and cannot."""
        choice = self.staging_choice(self._settings, arena.device.type)
        if choice.on_device:
            try:
                staged = self._stage_on(arena.device, transport, plan)
            except CannotRegister as error:
                if choice.required:
                    raise
                choice = Choice(False, str(error))
        if not choice.on_device:
            staged = self._stage_on(HOST, transport, plan, pinned=arena.is_cuda)
        where = [f"memory of {arena.device}", "host memory"]
        chosen, other = where if choice.on_device else reversed(where)
        decisions.record(STAGED, chosen, choice.why, other if arena.is_cuda else None)
        return staged

    def _stage_on(
        self, device: torch.device, transport: Transport, plan: ArenaPlan, pinned: bool = False
    ) -> tuple[Staging | None, Staging | None]:
        transfer, num_bytes = self._kv_transfer_config, self._settings.staging_bytes
        smallest = min(group.block_bytes for group in plan.groups)
        outgoing, incoming = (
            Staging(num_bytes, pinned, device, smallest) if used else None
            for used in (transfer.is_kv_producer, transfer.is_kv_consumer)
        )
        transport.register(
            None if outgoing is None else outgoing.buffer,
            None if incoming is None else incoming.buffer,
        )
        return outgoing, incoming

    def get_handshake_metadata(self) -> P2pHandshake | None:
        if self._server is None:
            return None
        return P2pHandshake(self._server.port, self._settings.staging_bytes)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, P2pMetadata)
        if (weights := kv_connector_metadata.weights) is not None:
            for side in (self._sender, self._receiver):
                if side is not None:
                    side.reset(weights)
        for req_id in kv_connector_metadata.withdrawn:
            assert self._sender is not None
            self._sender.withdraw(req_id)
        for job in kv_connector_metadata.sends:
            assert self._sender is not None
            self._sender.stage(job)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, P2pMetadata)
        if self._receiver is None:
            return
        for remote in metadata.expects:
            self._receiver.expect(remote)
        for remote in metadata.releases:
            self._receiver.give_up(remote)
        for job in metadata.receives:
            self._places[job.req_id] = job.places
            self._receiver.receive(job)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent = set() if self._sender is None else self._sender.take_staged()
        received = {} if self._receiver is None else self._receiver.take_received()
        for req_id, arrived in received.items():
            places = self._places.pop(req_id)
            if not arrived:
                for group, own in enumerate(places):
                    self._load_errors.update((group, place.block) for place in own)
        return sent or None, set(received) or None

    def get_kv_connector_stats(self) -> P2pStats | None:
        stats = P2pStats()
        for side in (self._sender, self._receiver):
            if side is not None:
                stats.aggregate(side.take_stats())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        sender, receiver, server = self._sender, self._receiver, self._server
        self._sender = self._receiver = self._server = None
        if sender is not None:
            sender.close()
        if server is not None:
            server.close()
        if receiver is not None:
            receiver.close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # ---- scheduler side ------------------------------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        told = [m for _, m in sorted(metadata.items()) if isinstance(m, P2pHandshake)]
        host, room = self._settings.host, self._settings.staging_bytes
        ports = tuple(m.port for m in told)
        self._scheduling.home = Home(self._kv_transfer_config.engine_id, host, ports, room)
        decisions.record(
            "state transfer",
            f"{type(self).__name__}, peers ask at {host}, ports {', '.join(map(str, ports))}",
            f"{room} bytes of staging memory per rank hold what peers have not fetched",
        )

    def on_new_request(self, request: Request) -> None:
        self._scheduling.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self._scheduling.num_matched(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduling.begin_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> P2pMetadata:
        return self._scheduling.take_metadata()

    def reset_cache(self) -> bool | None:
        self._scheduling.reset(weights_identity(self._vllm_config))
        return True

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finish(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduling.has_work()
