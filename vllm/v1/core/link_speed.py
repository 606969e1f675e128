# SPDX-License-Identifier: Apache-2.0
"""How fast the devices of one host exchange data: stated figures, each with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm.distributed.collective import Collective
from vllm.distributed.device_communicators.peer_sums import LARGEST
from vllm.kernels.all_reduce.cuda import MAX_RANKS, uses_two_shots

#: microseconds of a small message (protocol LL, ring) in NCCL's own cost model: to start, and per
#: hop (`baseLat` and `hwLat` of src/graph/tuning.cc)
_NCCL_BASE_S, _NCCL_NVLINK_HOP_S, _NCCL_PCIE_HOP_S = 6.6e-6, 0.6e-6, 1.0e-6
_SOURCE = "the bandwidth is the data sheet's, the latency that of NCCL's cost model"


#: bytes that a rank sends for a sum through peer memory -> microseconds that it takes, in a graph:
#: `benchmarks/all_reduce.py` on two H200 (docs/parallel.md, "Small sums")
_PEER_BYTES = tuple(8 * 1024 << i for i in range(7))
_PEER_US = (2.6, 2.4, 2.5, 3.1, 3.4, 4.1, 5.6)


@dataclass(frozen=True)
class LinkSpeed:
    """`bytes_per_s` that a device sends while it receives as much; `base_s` that an exchange takes
    beside its bytes, and `hop_s` for each device that it goes through. `source`: whose figures.

    `peer_sums`: small sums of ranks go through memory that the devices write to each other, in the
    time measured for it.
    """

    name: str
    bytes_per_s: float
    base_s: float
    hop_s: float
    source: str
    peer_sums: bool = False

    def collective_seconds(self, one: Collective, ranks: int, tokens: int) -> float:
        """Of one collective among `ranks` devices in a step of `tokens` tokens."""
        size = one.token_bytes * tokens
        small = 2 <= ranks <= MAX_RANKS and size <= LARGEST
        if self.peer_sums and small and one.kind == "all-reduce" and one.among == "ranks":
            return self._peer_seconds(size, ranks)
        sent = one.sent_bytes(ranks, tokens) / self.bytes_per_s
        return self.base_s + one.hops(ranks) * self.hop_s + sent

    def _peer_seconds(self, size: float, ranks: int) -> float:
        """Of a sum of `size` bytes: each rank sends its part to all others, or each of its rows to
        one rank, which sends the row's sum to all."""
        shots, sent = 1, size * (ranks - 1)
        if uses_two_shots(round(size), ranks):
            shots, sent = 2, size * (ranks - 1) / ranks
        measured = float(np.interp(sent, _PEER_BYTES, _PEER_US)) * 1e-6
        return shots * (measured + max(0.0, sent - _PEER_BYTES[-1]) / self.bytes_per_s)

    def message_seconds(self, num_bytes: float) -> float:
        """Of a message to a neighbour."""
        return self.base_s + self.hop_s + num_bytes / self.bytes_per_s


def _link(
    name: str, bytes_per_s: float, hop_s: float = _NCCL_NVLINK_HOP_S, *, peers: bool = False
) -> LinkSpeed:
    return LinkSpeed(name, bytes_per_s, _NCCL_BASE_S, hop_s, _SOURCE, peers)


#: data sheets give both directions together: half of that
LINKS = {
    link.name: link
    for link in (
        _link("NVLink3", 300e9),
        _link("NVLink4", 450e9, peers=True),
        _link("NVLink5", 900e9, peers=True),
        _link("PCIe4", 32e9, _NCCL_PCIE_HOP_S),
        _link("PCIe5", 64e9, _NCCL_PCIE_HOP_S),
    )
}
#: of the devices of `decode_cost.DEVICES`, by their data sheets (the SXM modules; L40S is a card)
LINK_OF_DEVICE = {
    "A100": "NVLink3",
    "H100": "NVLink4",
    "H200": "NVLink4",
    "B200": "NVLink5",
    "L40S": "PCIe4",
}


def link_speed(text: str) -> LinkSpeed:
    """The link of that name, or `BYTES` or `BYTES,US`: bytes per second in each direction,
    microseconds of an exchange beside its bytes. ValueError for anything else."""
    if text in LINKS:
        return LINKS[text]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    are_finite = all(map(math.isfinite, rates))
    if len(rates) not in (1, 2) or not are_finite or rates[0] <= 0 or rates[-1] < 0:
        known = ", ".join(LINKS)
        raise ValueError(
            f"link {text!r}: expected one of {known}, or its bytes per second in each direction "
            "(and microseconds per exchange), as 450e9,7"
        )
    if len(rates) == 2:
        return LinkSpeed("given link", rates[0], rates[1] * 1e-6, 0.0, "as given")
    source = "the bandwidth is as given, the latency that of NCCL's cost model"
    return LinkSpeed("given link", rates[0], _NCCL_BASE_S, _NCCL_NVLINK_HOP_S, source)


def link_of(device_name: str) -> LinkSpeed:
    """The link between devices of that name; ValueError for one that nothing is known of."""
    if device_name not in LINK_OF_DEVICE:
        raise ValueError(
            f"{device_name}: say how fast such devices exchange data with --decode-link, one of "
            + ", ".join(LINKS)
            + ", or bytes per second, as 450e9,7"
        )
    return LINKS[LINK_OF_DEVICE[device_name]]
