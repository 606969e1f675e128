# SPDX-License-Identifier: Apache-2.0
"""How fast a layout should compute prompts: a prediction from each rank's work and messages.

Steps are full of prompts of one length, of which the last token alone is sampled from. As of decode
steps (`decode_cost`), weights and states cross the memory bus once and matmuls run at the device's
full speed, so this is a bound: real matmuls reach some two thirds of it. A token attends to what
comes before it, half of its prompt on average; a recurrence is taken to need as many products as in
decoding. Stages work on pieces of prompts at the same time, so the slowest one sets the pace;
replicas add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.decode_cost import DeviceSpeed, PartWork, StateWork
from vllm.v1.core.layout_cost import Layout, StageWork
from vllm.v1.core.link_speed import LinkSpeed


@dataclass(frozen=True)
class PrefillCost:
    """Steps of `step_tokens` tokens per replica, of prompts of `length` tokens: `seconds` of the
    slowest stage, of which `exchange_seconds` go to exchanges; tokens of all replicas."""

    step_tokens: int
    length: int
    seconds: float
    exchange_seconds: float
    tokens_per_s: float


def predict_prefill(
    stages: Sequence[StageWork],
    layout: Layout,
    device: DeviceSpeed,
    link: LinkSpeed | None,
    step_tokens: int,
    length: int,
) -> PrefillCost:
    """`link` may be None where nothing is exchanged. ValueError for a step or prompts without
    tokens."""
    if step_tokens < 1 or length < 1:
        raise ValueError(f"prefills need tokens, got {step_tokens} of prompts of {length}")
    costs = [_stage_seconds(work, layout, device, link, step_tokens, length) for work in stages]
    computing, exchanges = max(costs, key=sum)
    seconds = computing + exchanges
    rate = layout.dp * step_tokens / seconds
    return PrefillCost(step_tokens, length, seconds, exchanges, rate)


def _stage_seconds(
    work: StageWork,
    layout: Layout,
    device: DeviceSpeed,
    link: LinkSpeed | None,
    tokens: int,
    length: int,
) -> tuple[float, float]:
    """Computing and exchanges of one stage's step."""
    computing = sum(_part_seconds(part, device, tokens, length) for part in work.parts)
    if link is None:
        return computing, 0.0
    sampled = max(1, round(tokens / length))
    exchanges = sum(
        link.collective_seconds(
            one, layout.group_size(one), sampled if one.what == "logits" else tokens
        )
        for one in work.collectives
    )
    if work.stream_bytes:
        exchanges += link.message_seconds(work.stream_bytes * tokens)
    return computing, exchanges


def _part_seconds(part: PartWork, device: DeviceSpeed, tokens: int, length: int) -> float:
    # A piece of a longer prompt is as much of one as it has tokens.
    prompts = tokens / length
    weights = part.weight_bytes + sum(one.bytes(tokens) for one in part.experts)
    products = tokens * (part.flops - part.head_flops) + prompts * part.head_flops
    states = [_state(state, length) for state in part.states]
    state_bytes = max(1.0, prompts) * sum(moved for moved, _ in states)
    state_flops = tokens * sum(flops for _, flops in states)
    seconds = part.launches * device.launch_s
    for size, flops in ((weights, products), (state_bytes, state_flops)):
        seconds += max(size / device.bytes_per_s, flops / device.flops_per_s)
    return seconds


def _state(state: StateWork, length: int) -> tuple[float, float]:
    """Bytes of one prompt in one step, and FLOPs of each of its tokens, on average."""
    window = length if state.window is None else min(state.window, length)
    kept = (window * (window + 1) / 2 + (length - window) * window) / length
    return (
        state.fixed_bytes + state.bytes_per_token * kept,
        state.fixed_flops + state.flops_per_token * kept,
    )
