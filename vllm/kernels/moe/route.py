# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Routing as one launch: a program per token."""

import torch
import triton
import triton.language as tl

from vllm.kernels.moe import Routing, RoutingProblem
from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import next_power_of_2


@triton.jit
def _in_best_groups(choice, member, GROUPS: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr):
    """`choice [groups, members]`, minus infinity outside the best groups."""
    best = tl.max(choice, 1)
    if TOP2:
        first = tl.argmax(choice, 1)
        best += tl.max(tl.where(member == first[:, None], float("-inf"), choice), 1)
    group = tl.arange(0, GROUPS)
    kept = group < 0
    for _ in tl.static_range(TOP):
        chosen = group == tl.argmax(best, 0)
        kept = kept | chosen
        best = tl.where(chosen, float("-inf"), best)
    return tl.where(kept[:, None], choice, float("-inf"))


@triton.jit
def _softplus(x):
    """`log(1 + exp(x))`, exact to the last bits for very negative `x`, too."""
    e = tl.exp(-tl.abs(x))
    one_plus = 1.0 + e
    small = one_plus == 1.0
    log = tl.log(one_plus) * (e / tl.where(small, 1.0, one_plus - 1.0))
    return tl.maximum(x, 0.0) + tl.where(small, e, log)


@triton.jit
def _ordered(x):
    """Integers in the order of `x` in fp32, but for zeros' signs: a warp finds the largest of such
    in one instruction."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["stride_logits"])
def _route_kernel(
    logits_ptr, bias_ptr, chosen_ptr, weights_ptr, experts_ptr, counts_ptr, cache_slots_ptr,
    stride_logits, epsilon, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SOFTMAX: tl.constexpr, SOFTPLUS: tl.constexpr,
    RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr,
    COUNT: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores lie in a tile of groups by members; both are padded to powers of two."""
    start_next(PDL)
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_M)[None, :]
    inside = (group < GROUPS) & (member < MEMBERS)
    expert = group * MEMBERS + member
    row = logits_ptr + token * stride_logits
    logit = tl.load(row + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    elif SOFTPLUS:
        score = tl.sqrt(_softplus(logit))
    else:
        score = tl.sigmoid(logit)
    score = tl.where(score == score, score, 0.0)
    choice = score
    if BIAS:
        choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        choice = _in_best_groups(choice, member, BLOCK_G, TOP_GROUPS, TOP2)
    choice = _ordered(choice)
    score_bits = score.to(tl.int32, bitcast=True)
    slot = tl.arange(0, BLOCK_S)
    weights = tl.zeros((BLOCK_S,), tl.float32)
    experts = tl.zeros((BLOCK_S,), tl.int32)
    for k in tl.static_range(TOP_K):
        if CHOSEN:
            first = tl.load(chosen_ptr + token * TOP_K + k)
        else:
            largest = tl.max(tl.max(choice, 1), 0)
            candidates = tl.where((choice == largest) & inside, expert, GROUPS * MEMBERS - 1)
            first = tl.min(tl.min(candidates, 1), 0)
        chosen = (expert == first) & inside
        weight = tl.sum(tl.sum(tl.where(chosen, score_bits, 0), 1), 0)
        weights = tl.where(slot == k, weight.to(tl.float32, bitcast=True), weights)
        experts = tl.where(slot == k, first, experts)
        choice = tl.where(chosen, -(2**31), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + epsilon)
    weights = weights * scale
    if COUNT:
        counted = slot < TOP_K
        if PADDED:
            counted = counted & (tl.load(cache_slots_ptr + token) >= 0)
        tl.atomic_add(counts_ptr + experts, 1, mask=counted, sem="relaxed")
    if SLOTS > TOP_K:
        gate = 1.0
        if GATED:
            gate = tl.sigmoid(tl.load(row + GROUPS * MEMBERS).to(tl.float32))
        weights = tl.where(slot == TOP_K, gate, weights)
        experts = tl.where(slot == TOP_K, GROUPS * MEMBERS, experts)
    tl.store(weights_ptr + token * SLOTS + slot, weights, mask=slot < SLOTS)
    tl.store(experts_ptr + token * SLOTS + slot, experts - FIRST, mask=slot < SLOTS)


_route = Launcher(_route_kernel)


def route_experts(problem: RoutingProblem) -> Routing:
    """See `naive.route_experts`."""
    logits, rule, slots = problem.logits, problem.rule, problem.slots
    tokens = len(logits)
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, slots, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return Routing(weights, experts)
    members = problem.num_experts // rule.num_groups
    columns = next_power_of_2(members)
    _route[(tokens,)](
        logits, problem.bias, problem.chosen, weights, experts, problem.counts,
        problem.cache_slots, logits.stride(0), rule.epsilon, rule.scale,
        TOP_K=rule.top_k,
        SLOTS=slots,
        GROUPS=rule.num_groups,
        MEMBERS=members,
        TOP_GROUPS=rule.top_groups,
        TOP2=rule.group_score == "top2",
        SOFTMAX=rule.scores == "softmax",
        SOFTPLUS=rule.scores == "sqrtsoftplus",
        RENORMALIZE=rule.renormalize,
        BIAS=problem.bias is not None,
        CHOSEN=problem.chosen is not None,
        GATED=problem.shared == "gated",
        COUNT=problem.counts is not None,
        PADDED=problem.cache_slots is not None,
        FIRST=problem.first,
        BLOCK_G=next_power_of_2(rule.num_groups),
        BLOCK_M=columns,
        BLOCK_S=next_power_of_2(slots),
        num_warps=1,
        **dependent_launch(logits.device),
    )  # fmt: skip
    return Routing(weights, experts)
