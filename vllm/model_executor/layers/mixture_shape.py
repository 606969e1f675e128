# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts is made of: its sizes, its router's parts and its experts' kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm.exceptions import VLLMValidationError
from vllm.kernels.moe import ClampedSwiglu, RoutingRule
from vllm.model_executor.layers.activation import get_act_fn


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of the whole layer before sharding, and its routing.

    `shared_intermediate_size`: of an expert that every token goes through, 0 for none;
    `shared_gate`: whether its output is multiplied by `sigmoid(shared_expert_gate(x))`.
    `correction_bias`: whether the router has a bias that counts for the choice alone;
    `wide_router`: whether its logits are fp32 whatever the model. Experts that are not `gated`, the
    shared one too, are `down(act(up(x)))`. `latent_size`: width of what the routed experts read and
    write, between projections from and to `hidden_size`; 0 for no projections. `router_bias`:
    whether the router has a bias of its logits. `expert_biases`: whether the experts' products have
    biases. `clamp`: of all experts' activation (`Kernels.clamped_swiglu`), None for SwiGLU.
    `hashed_vocab`: size of the vocabulary whose tokens each have experts of their own, whatever the
    scores are; 0 where scores choose.
    `may_stack_shared`: whether the shared expert is quantised as the others are, and every rank has
    a part of each.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    rule: RoutingRule
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    correction_bias: bool = False
    hidden_act: str = "silu"
    gated: bool = True
    wide_router: bool = False
    latent_size: int = 0
    router_bias: bool = False
    expert_biases: bool = False
    clamp: ClampedSwiglu | None = None
    hashed_vocab: int = 0
    may_stack_shared: bool = True

    def check(self) -> None:
        """Raises VLLMValidationError for experts that are not served."""
        self.rule.check(self.num_experts)
        if self.expert_biases and (self.stacks_shared or not self.gated):
            raise VLLMValidationError(
                "experts with biases: neither a shared expert among them nor experts "
                "without gate are supported"
            )
        if not self.gated:
            get_act_fn(self.hidden_act)
        elif self.hidden_act != "silu":
            raise VLLMValidationError(
                f"experts: hidden_act {self.hidden_act!r} is not supported; supported: 'silu'"
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise VLLMValidationError(
                "shared_expert_intermediate_size 0 is not supported: the gate of a shared expert "
                "needs one"
            )

    @property
    def expert_width(self) -> int:
        """What the routed experts read and write."""
        return self.latent_size or self.hidden_size

    @property
    def shared(self) -> Literal["added", "gated"] | None:
        """See `RoutingProblem`."""
        if not self.shared_intermediate_size:
            return None
        return "gated" if self.shared_gate else "added"

    @property
    def stacks_shared(self) -> bool:
        """Whether the shared expert has the others' size, and so is one more of the stack."""
        same_size = self.shared_intermediate_size == self.intermediate_size
        return self.may_stack_shared and same_size and not self.latent_size
