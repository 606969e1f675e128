# SPDX-License-Identifier: Apache-2.0
"""How long decode steps of a layout should take: a prediction from each rank's work and messages.

To each stage's work by `decode_cost` come its collectives and what it sends to the next stage, one
after the other. With stages the requests go around in as many groups as there are stages
(docs/pipeline_parallel.md), so a request's next token comes after its own way through all of
them, or after the slowest one has served every group. Replicas do not slow each other, unless they
share experts: then each has as many requests, and its rank runs its experts for all. Left out:
prefills, sampling, the host, and what communication could overlap with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.distributed.collective import Collective
from vllm.v1.core.decode_cost import DeviceSpeed, PartWork, predict
from vllm.v1.core.link_speed import LinkSpeed

_PARTS = re.compile(r"(tp|pp|dp)(\d+)|(ep)")


@dataclass(frozen=True)
class Layout:
    """How devices are used: `tp` ranks share each layer of a stage, `pp` stages are one of `dp`
    replicas; `ep`: ranks have whole experts, which replicas share."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def exchanges(self) -> bool:
        """Whether devices depend on each other."""
        return self.tp * self.pp > 1 or (self.ep and self.dp > 1)

    def group_size(self, one: Collective) -> int:
        """How many take part."""
        return self.dp if one.among == "replicas" else self.tp

    @property
    def name(self) -> str:
        """As `parse` reads it: `tp2pp2`, `tp1` for a single device."""
        sizes = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp))
        text = "".join(f"{kind}{size}" for kind, size in sizes if size > 1) or "tp1"
        return text + ("ep" if self.ep else "")

    @property
    def flags(self) -> dict[str, int | bool]:
        """The fields of `ParallelConfig` and `EngineArgs`."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": self.dp,
            "enable_expert_parallel": self.ep,
        }

    @staticmethod
    def parse(text: str) -> Layout:
        """`tp2`, `pp2`, `tp2pp2dp2`, `tp4ep`; ValueError for anything else."""
        found = _PARTS.findall(text)
        kinds = [kind or flag for kind, _, flag in found]
        sizes = {kind: int(size) for kind, size, flag in found if not flag}
        whole = "".join(kind + size + flag for kind, size, flag in found) == text
        if not text or not whole or len(set(kinds)) < len(kinds) or 0 in sizes.values():
            raise ValueError(
                f"layout {text!r}: expected sizes such as tp2, pp2, dp2, tp2pp2, tp4ep (tensor, "
                "pipeline and data parallel; ep: whole experts)"
            )
        return Layout(**sizes, ep="ep" in kinds)


def layouts_of(devices: int, expert_parallel: Sequence[bool]) -> Iterator[Layout]:
    """Every layout of so many devices, those with the least parallelism inside a replica first;
    with each of `expert_parallel` where ranks share layers, or replicas without stages experts."""
    for dp in range(devices, 0, -1):
        for pp in range(1, devices // dp + 1):
            if devices % (dp * pp):
                continue
            tp = devices // (dp * pp)
            shared = tp > 1 or (dp > 1 and pp == 1)
            for ep in expert_parallel if shared else (expert_parallel[0],):
                yield Layout(tp, pp, dp, ep)


@dataclass(frozen=True)
class StageWork:
    """What one rank of a stage does in a step. Per token it sends `stream_bytes` to the next stage,
    and the last stage `sample_bytes` to all earlier ones."""

    parts: Sequence[PartWork]
    collectives: Sequence[Collective]
    stream_bytes: int = 0
    sample_bytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, by what they are for, and in how many exchanges."""

    all_reduces: float
    experts: float
    all_gathers: float
    streams: float
    exchanges: int

    @property
    def total(self) -> float:
        return self.all_reduces + self.experts + self.all_gathers + self.streams


@dataclass(frozen=True)
class StepCost:
    """Decode steps with `batch` requests per replica: `seconds` until each has one token more, of
    which `exchange_seconds` go to exchanges on a request's way; tokens of all replicas."""

    batch: int
    context: int
    seconds: float
    exchange_seconds: float
    tokens_per_s: float


def traffic_of(work: StageWork, layout: Layout, tokens: int) -> Traffic:
    """Of one rank of a stage in a step of `tokens` tokens."""

    def sent(*, experts: bool, kinds: Sequence[str]) -> float:
        return sum(
            one.sent_bytes(layout.group_size(one), tokens)
            for one in work.collectives
            if (one.what == "experts") is experts and one.kind in kinds
        )

    return Traffic(
        all_reduces=sent(experts=False, kinds=("all-reduce",)),
        experts=sent(experts=True, kinds=("all-reduce", "all-gather", "reduce-scatter")),
        all_gathers=sent(experts=False, kinds=("all-gather",)),
        streams=float((work.stream_bytes + work.sample_bytes) * tokens),
        exchanges=len(work.collectives) + bool(work.stream_bytes) + bool(work.sample_bytes),
    )


def stage_seconds(
    work: StageWork,
    layout: Layout,
    device: DeviceSpeed,
    link: LinkSpeed | None,
    tokens: int,
    context: int,
) -> tuple[float, float]:
    """Of a step of `tokens` requests on one stage: computing, and exchanges; `link` is None where
    there are none."""
    computing = predict(work.parts, device, tokens, context).seconds
    if link is None:
        return computing, 0.0
    exchanges = sum(
        link.collective_seconds(one, layout.group_size(one), tokens) for one in work.collectives
    )
    if work.stream_bytes:
        exchanges += link.message_seconds(work.stream_bytes * tokens)
    return computing, exchanges


def predict_layout(
    stages: Sequence[StageWork],
    layout: Layout,
    device: DeviceSpeed,
    link: LinkSpeed | None,
    batch: int,
    context: int,
) -> StepCost:
    """Steps in which each of `batch` requests per replica gets a token; `link` may be None where
    nothing is exchanged."""
    groups = min(batch, layout.pp)
    tokens = -(-batch // groups)
    costs = [stage_seconds(work, layout, device, link, tokens, context) for work in stages]
    samples = stages[-1].sample_bytes * tokens
    back = link.message_seconds(samples) if link is not None and samples else 0.0
    way = sum(computing + exchanges for computing, exchanges in costs) + back
    seconds = max(way, groups * max(map(sum, costs)))
    exchange_seconds = sum(exchanges for _, exchanges in costs) + back
    return StepCost(batch, context, seconds, exchange_seconds, layout.dp * batch / seconds)
