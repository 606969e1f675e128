# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in plain torch: what every platform computes."""

from collections.abc import Callable
from dataclasses import astuple

import torch
from torch import Tensor

from vllm.kernels.activation.naive import clamped_swiglu, relu_squared, silu_and_mul
from vllm.kernels.fp8.naive import linear_fp8, linear_fp8_block
from vllm.kernels.moe import ExpertMatrix, ExpertsProblem, Routing, RoutingProblem
from vllm.kernels.norm.naive import accumulation_dtype


def _softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`. On a CPU torch's own rounds an element by its place in the tensor."""
    return x.clamp(min=0) + x.abs().neg().exp().log1p()


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: _softplus(logits).sqrt(),
}


def route_experts(problem: RoutingProblem) -> Routing:
    """The experts of every token by `problem.rule`, of equal ones the first, or those of
    `problem.chosen`. Never synchronises.

    A logit that is no number counts as a score of 0, so padding is routed somewhere, too.
    """
    rule, tokens = problem.rule, len(problem.logits)
    wide = problem.logits.to(accumulation_dtype(problem.logits))
    logits = wide[:, : problem.num_experts]
    scores = _SCORES[rule.scores](logits).nan_to_num(0.0)
    chosen = _best(scores, problem) if problem.chosen is None else problem.chosen.long()
    weights = scores.gather(1, chosen)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    weights = weights * rule.scale
    if problem.counts is not None:
        _count(problem, chosen)
    if problem.shared is not None:
        gate = torch.ones_like(weights[:, :1])
        if problem.shared == "gated":
            gate = wide[:, problem.num_experts, None].sigmoid()
        weights = torch.cat([weights, gate], 1)
        number = chosen.new_full((tokens, 1), problem.num_experts)
        chosen = torch.cat([chosen, number], 1)
    return Routing(weights, (chosen - problem.first).int())


def _best(scores: Tensor, problem: RoutingProblem) -> Tensor:
    """`[tokens, top_k]`, the best first."""
    rule = problem.rule
    choice = scores if problem.bias is None else scores + problem.bias
    if rule.top_groups < rule.num_groups:
        choice = _in_best_groups(choice, problem)
    return choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]


def _in_best_groups(choice: Tensor, problem: RoutingProblem) -> Tensor:
    """`choice [tokens, experts]`, minus infinity outside the best groups."""
    rule = problem.rule
    groups = choice.unflatten(1, (rule.num_groups, -1))
    best = 2 if rule.group_score == "top2" else 1
    score = groups.topk(best, dim=-1).values.sum(-1)
    kept = score.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    outside = torch.ones_like(score, dtype=torch.bool).scatter_(1, kept, False)
    return groups.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


def _count(problem: RoutingProblem, chosen: Tensor) -> None:
    assert problem.counts is not None
    ones = torch.ones_like(chosen)
    if problem.cache_slots is not None:
        ones *= (problem.cache_slots >= 0)[:, None]
    problem.counts.scatter_add_(0, chosen.flatten(), ones.flatten())


def run_experts(problem: ExpertsProblem) -> Tensor:
    """`sum over slots of weight * down(silu(gate(x)) * up(x))`, or of `down(relu(up(x))^2)`:
    `[tokens, hidden]`.

    Each product, with its bias if it has one, and the activation are rounded to the dtype of `x`;
    the sum runs in fp32 in the order of the slots and is rounded once. What float8 experts are
    given is made float8 before each product.
    """
    outputs = problem.x.new_zeros(*problem.experts.shape, problem.x.shape[1])
    for expert in filter(problem.has, problem.experts.unique().tolist()):
        token, slot = torch.where(problem.experts == expert)
        inner, outer = problem.matrices(expert)
        hidden = _product(problem.x[token], inner)
        if not problem.gated:
            active = relu_squared(hidden)
        elif problem.clamp is None:
            active = silu_and_mul(hidden)
        else:
            active = clamped_swiglu(hidden, *astuple(problem.clamp))
        outputs[token, slot] = _product(active, outer)
    return add_slots(problem, outputs)


def _product(x: Tensor, matrix: ExpertMatrix) -> Tensor:
    """In the dtype of `x`, rounded once."""
    if matrix.scale is not None:
        multiply = linear_fp8 if matrix.scale.dim() == 1 else linear_fp8_block
        return multiply(x, matrix.weight, matrix.scale, matrix.bias)
    wide = accumulation_dtype(x)
    out = x.to(wide) @ matrix.weight.to(wide).t()
    return (out if matrix.bias is None else out + matrix.bias.to(wide)).to(x.dtype)


def add_slots(problem: ExpertsProblem, outputs: Tensor) -> Tensor:
    """The weighted sum of the stack's `outputs [tokens, slots, hidden]` and the shared expert's."""
    wide = accumulation_dtype(problem.x)
    weights = problem.routing.weights.to(wide)
    total = torch.zeros_like(problem.x, dtype=wide)
    for slot in range(outputs.shape[1]):
        total += weights[:, slot, None] * outputs[:, slot].to(wide)
    if problem.shared is not None:
        total += weights[:, -1:] * problem.shared.to(wide)
    return total.to(problem.x.dtype)
