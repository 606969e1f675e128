# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: how tokens choose experts, and what the experts are given.

A token has `slots`: the experts it is routed to, and a shared expert, if there is one, last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True)
class RoutingRule:
    """How a family turns router logits into experts and their weights.

    Scores are the softmax over all experts, a sigmoid, or the square root of the softplus
    ("sqrtsoftplus", DeepSeek-V4), in fp32. The `top_k` experts of the largest score, plus a
    correction bias where the family has one (DeepSeek-V3, arXiv 2412.19437, equation 16), are
    chosen; of `num_groups` equal runs of experts only the `top_groups` best are looked at, a group
    being as good as its best expert ("max") or its best two together ("top2").
    Weights are the scores without bias, divided by their sum plus `epsilon` if `renormalize`, times
    `scale`. A softmax over the chosen logits alone (Mixtral, gpt-oss) is "softmax", renormalised.

    Raises:
        VLLMValidationError: more groups are kept than there are.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renormalize: bool = True
    epsilon: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.num_groups:
            raise VLLMValidationError(f"{self.top_groups} groups of experts of {self.num_groups}")

    def check(self, num_experts: int) -> None:
        """Raises VLLMValidationError where `num_experts` cannot be routed to by this rule."""
        reachable = num_experts // self.num_groups * self.top_groups
        if num_experts % self.num_groups or not 1 <= self.top_k <= reachable:
            raise VLLMValidationError(
                f"{self.top_k} experts of {num_experts} in {self.num_groups} groups, of which "
                f"{self.top_groups} are looked at: groups must be equal and large enough"
            )
        if self.group_score == "top2" and num_experts < 2 * self.num_groups:
            raise VLLMValidationError(
                f"{num_experts} experts in {self.num_groups} groups: a group is as good as its "
                "best two experts, so it needs two"
            )


@dataclass(frozen=True)
class RoutingProblem:
    """`logits [tokens, columns]`: of the experts, then, if `shared` is "gated", of the shared
    expert's gate; further columns are padding. `bias [experts]` fp32 or None.

    `shared`: "added" and "gated" append a slot for expert number `num_experts`, with weight 1 or
    the sigmoid of its logit. `counts [experts]` int64 is incremented for every routed slot of every
    token, but for those with a negative one of `cache_slots [tokens]` int64, which are padding;
    None: nothing is counted. The result counts experts from `first` on: these are their places in
    the stack of a rank that has those from there. `chosen [tokens, top_k]` int32, contiguous: the
    experts where something else than the scores chooses; these still make the weights.
    """

    logits: Tensor
    num_experts: int
    rule: RoutingRule
    bias: Tensor | None = None
    shared: Literal["added", "gated"] | None = None
    counts: Tensor | None = None
    cache_slots: Tensor | None = None
    first: int = 0
    chosen: Tensor | None = None

    @property
    def slots(self) -> int:
        return self.rule.top_k + (self.shared is not None)


@dataclass(frozen=True)
class Routing:
    """`weights [tokens, slots]` fp32 and `experts [tokens, slots]` int32, routed slots in
    descending order of what they were chosen by, or as `RoutingProblem.chosen` has them."""

    weights: Tensor
    experts: Tensor


@dataclass(frozen=True)
class ClampedSwiglu:
    """The arguments of `Kernels.clamped_swiglu`: gpt-oss has an offset of 1, DeepSeek-V4 none."""

    alpha: float
    limit: float
    offset: float


@dataclass(frozen=True)
class ExpertScales:
    """Of float8 stacks, fp32: one per row, `gate_up [experts, rows]` and `down [experts, hidden]`,
    or one per row and 128 channels, `[experts, ceil(channels / 128), rows]`. What is multiplied
    by a stack is made float8 likewise: `vllm.kernels.fp8`."""

    gate_up: Tensor
    down: Tensor

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    @property
    def grouped(self) -> bool:
        """Whether channels have scales of their own."""
        return self.gate_up.dim() == 3


@dataclass(frozen=True)
class ExpertMatrix:
    """One product of one expert: `weight [rows, channels]`, `bias [rows]`, and of a float8 weight
    `scale [rows]` or `[ceil(channels / 128), rows]`."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


@dataclass(frozen=True)
class ExpertsProblem:
    """`x [tokens, hidden]`; experts are stacked: `gate_up [experts, 2 * intermediate, hidden]`,
    the gate's rows first, and `down [experts, hidden, intermediate]`, both contiguous. Experts that
    are not `gated` have up projections alone, `[experts, intermediate, hidden]`, and the squared
    ReLU for SwiGLU.

    `gate_up_bias [experts, 2 * intermediate]` and `down_bias [experts, hidden]`, contiguous, both
    or neither. The activation is SwiGLU, clamped if `clamp` is given. `shared [tokens, hidden]` is
    the output of the last slot's expert where that is not one of the stack. Both stacks are e4m3 if
    `scales` are given, else of the dtype of `x`.

    Slots whose expert is not in the stack add nothing: other ranks have it. `ranks`: among how many
    the routed slots are spread.
    """

    x: Tensor
    gate_up: Tensor
    down: Tensor
    routing: Routing
    shared: Tensor | None = None
    gated: bool = True
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: ClampedSwiglu | None = None
    scales: ExpertScales | None = None
    ranks: int = 1

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    @property
    def intermediate(self) -> int:
        return self.down.shape[2]

    @property
    def experts(self) -> Tensor:
        """`[tokens, slots]` int32 of the slots that the stack computes."""
        experts = self.routing.experts
        return experts if self.shared is None else experts[:, :-1]

    def has(self, expert: int) -> bool:
        """Whether an expert is in the stack."""
        return 0 <= expert < self.num_experts

    def matrices(self, expert: int) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Those of one expert's two products."""
        inner, outer = (None, None) if self.scales is None else self.scales.both
        return (
            _matrix(expert, self.gate_up, self.gate_up_bias, inner),
            _matrix(expert, self.down, self.down_bias, outer),
        )


def _matrix(expert: int, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> ExpertMatrix:
    return ExpertMatrix(
        weight[expert],
        None if bias is None else bias[expert],
        None if scale is None else scale[expert],
    )
