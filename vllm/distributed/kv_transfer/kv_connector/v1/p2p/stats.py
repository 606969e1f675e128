# SPDX-License-Identifier: Apache-2.0
"""Counters of state transfer between engines, and how `/metrics` shows them."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import CounterPromMetrics, CounterStats

#: key of the statistics -> metric without `vllm:`, its help
COUNTERS = {
    "sent_requests": ("kv_p2p_sent_requests", "Requests whose state was made ready for a peer."),
    "sent_bytes": ("kv_p2p_sent_bytes", "Bytes made ready for peers."),
    "failed_sends": ("kv_p2p_failed_sends", "Requests whose state could not be made ready."),
    "expired_leases": ("kv_p2p_expired_leases", "Requests whose state nobody fetched in time."),
    "received_requests": ("kv_p2p_received_requests", "Requests whose state was fetched."),
    "received_bytes": ("kv_p2p_received_bytes", "Bytes fetched from peers."),
    "receive_seconds": ("kv_p2p_receive_time", "Seconds from asking for state to having it."),
    "failed_receives": ("kv_p2p_failed_receives", "Requests whose state could not be fetched."),
}


class P2pStats(CounterStats):
    """Of one worker or the scheduler."""


class P2pPromMetrics(CounterPromMetrics):
    """`vllm:kv_p2p_*`."""

    counters = COUNTERS
