# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in place of a feed-forward network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from vllm import decisions
from vllm.config import ParallelConfig, VllmConfig
from vllm.config.current import get_current_vllm_config_or_none
from vllm.distributed.collective import Collective, Communicates
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_dp_group, get_tp_group
from vllm.distributed.utils import per_rank
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import get_forward_context
from vllm.kernels.moe import ExpertsProblem, Routing, RoutingProblem
from vllm.kernels.residual_stream import ResidualStream
from vllm.kernels.tuning.shapes import ExpertsShape, KernelShapes, ReadsTiles
from vllm.model_executor.layers.expert_copies import ExpertCopies
from vllm.model_executor.layers.expert_exchange import ExpertExchange
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.mlp import GatedMLP, UngatedMLP
from vllm.model_executor.layers.quantization.base import ExpertsMethod, QuantizationConfig
from vllm.model_executor.layers.quantization.unquantized import UnquantizedExpertsMethod
from vllm.model_executor.layers.router import Router
from vllm.model_executor.parameter import (
    ExpertStack,
    Section,
    WeightLayout,
    WeightLoader,
    default_weight_loader,
    empty_parameter,
    sections_loader,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

#: an expert's number and its weight, as replicas tell each other
_CHOICE_BYTES = 8


class Experts(nn.Module):
    """The experts' stacked weights.

    Gate and up projections `[experts, 2 * intermediate, hidden]`, the gate's rows first, and
    down projections `[experts, hidden, intermediate]`, both sharded along the intermediate size,
    or with `expert_parallel` whole, but those of the rank's own experts alone: equal runs, as far
    as the ranks divide the experts, or what `copies` place there; `rank` is then one of all that
    share them. Without gate the first are the up projections alone.

    A checkpoint has them stacked like this, or expert by expert. Biases, if the shape has them, are
    `gate_up_proj_bias [experts, 2 * intermediate]`, sharded like the products' results, and
    `down_proj_bias [experts, hidden]`, which is zero on all ranks but the first, for it is added
    once. Float8 stacks have scales beside them (`Fp8ExpertsMethod`).
    """

    #: names of tensors expert by expert, for `stacked_names`
    CHECKPOINT_NAMES = (
        ("experts.gate_up_proj", "experts.*.gate_proj.weight", 0),
        ("experts.gate_up_proj", "experts.*.up_proj.weight", 1),
        ("experts.down_proj", "experts.*.down_proj.weight", 0),
        ("experts.gate_up_proj", "shared_expert.gate_proj.weight", 0),
        ("experts.gate_up_proj", "shared_expert.up_proj.weight", 1),
        ("experts.down_proj", "shared_expert.down_proj.weight", 0),
    )
    UNGATED_CHECKPOINT_NAMES = (
        ("experts.gate_up_proj", "experts.*.up_proj.weight", 0),
        ("experts.down_proj", "experts.*.down_proj.weight", 0),
        ("experts.gate_up_proj", "shared_expert.up_proj.weight", 0),
        ("experts.down_proj", "shared_expert.down_proj.weight", 0),
    )

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        shape: MixtureShape,
        method: ExpertsMethod,
        rank: int,
        num_ranks: int,
        expert_parallel: bool,
        copies: ExpertCopies | None = None,
    ) -> None:
        super().__init__()
        first, end = 0, shape.num_experts
        if expert_parallel:
            first, end = (shape.num_experts * (rank + i) // num_ranks for i in range(2))
        held = tuple(range(first, end))
        if copies is not None:
            held = copies.placement.experts_of(rank)
            first = rank * len(held)
        if expert_parallel:
            rank, num_ranks = 0, 1
        self.stack = stack = ExpertStack(shape.num_experts, held, shape.stacks_shared)
        #: number of the first expert, or slot
        self.first = first
        inner = per_rank("rows of an expert", shape.intermediate_size, num_ranks)
        sections = tuple(
            Section(i, shape.intermediate_size, num_ranks, rank) for i in range(1 + shape.gated)
        )
        width = Section(0, shape.expert_width)
        self.method = method
        method.create_weights(self, "gate_up_proj", WeightLayout(sections, width), stack)
        method.create_weights(self, "down_proj", WeightLayout((width,), sections[0]), stack)
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        if shape.expert_biases:
            self.gate_up_proj_bias = empty_parameter(stack.size, 2 * inner)
            load = partial(_load_bias, stack=stack, load=sections_loader(sections, dim=1))
            set_weight_attrs(self.gate_up_proj_bias, {"weight_loader": load})
            self.down_proj_bias = empty_parameter(stack.size, shape.hidden_size)
            once = _load_zeros if rank > 0 else default_weight_loader
            load = partial(_load_bias, stack=stack, load=once)
            set_weight_attrs(self.down_proj_bias, {"weight_loader": load})


def _load_bias(param: Tensor, loaded: Tensor, *, stack: ExpertStack, load: WeightLoader) -> None:
    """Of all routed experts, which are all there are; raises WeightShapeError."""
    load(param, stack.part(loaded))


def _load_zeros(param: Tensor, loaded: Tensor) -> None:
    """What another rank adds; raises WeightShapeError."""
    default_weight_loader(param, torch.zeros_like(loaded))


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    """A model's mixtures, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def has_mixtures(model: nn.Module) -> bool:
    """Whether some layer's kernels follow from how many tokens an expert gets."""
    return bool(mixtures_of(model))


def expert_counts(model: nn.Module) -> dict[str, list[int]]:
    """By layer, how many tokens each routed expert got since the start; empty where the
    configuration does not count. Waits for the device."""
    counted = {m.layer_name: m.counts for m in mixtures_of(model) if m.counts is not None}
    return {name: counts.tolist() for name, counts in counted.items()}


def forget_counts(models: Iterable[nn.Module]) -> None:
    """Count from zero again."""
    counted = [mixture.counts for model in models for mixture in mixtures_of(model)]
    for counts in counted:
        if counts is not None:
            counts.zero_()


def _is_kept(quant_config: QuantizationConfig | None, prefix: str) -> bool:
    """Whether what is called `prefix` has 16-bit weights."""
    return quant_config is None or quant_config.is_excluded(prefix)


def _experts_method(quant_config: QuantizationConfig | None, prefix: str) -> ExpertsMethod:
    if quant_config is None:
        return UnquantizedExpertsMethod()
    return quant_config.get_experts_method(f"{prefix}.experts")


def _spreads_experts(config: VllmConfig, ranks: int) -> bool:
    """Whether ranks have whole experts."""
    wanted = config.parallel_config.enable_expert_parallel
    if wanted and ranks == 1:
        decisions.record("expert parallelism", "off", "one rank has all experts")
    return wanted and ranks > 1


def check_expert_parallel(
    model: nn.Module, beside: Sequence[nn.Module], config: ParallelConfig, is_stage: bool
) -> None:
    """Raises VLLMValidationError where experts are to be spread and there are none, which is no
    fault of a pipeline stage, or a drafter `beside` has some that replicas would share."""
    config.check_experts(is_stage or has_mixtures(model))
    if config.replicas_share_experts and any(map(has_mixtures, beside)):
        raise VLLMValidationError(
            "--enable-expert-parallel with --data-parallel-size: the drafter has experts, too, and "
            "replicas do not draft together; leave the drafter out, take one without experts, or "
            "use --tensor-parallel-size instead of --data-parallel-size",
            "speculative_config",
        )


def _shared_network(
    shape: MixtureShape, prefix: str, quant_config: QuantizationConfig | None
) -> GatedMLP | UngatedMLP:
    sizes = (shape.hidden_size, shape.shared_intermediate_size, shape.hidden_act, False, prefix)
    if shape.gated:
        return GatedMLP(*sizes, quant_config, reduce_results=False, clamp=shape.clamp)
    return UngatedMLP(*sizes, quant_config, reduce_results=False)


class MixtureOfExperts(nn.Module, Communicates, ReadsTiles):
    """Every token goes through the experts that its router chooses, and through the shared one.

    A shared expert of the same size, quantised or not as the others are, lies in the experts'
    stack; another is a network of its own, `shared_expert`. With a latent size the routed experts'
    sum goes through `fc2_latent_proj`, and then the shared expert's output is added. Raises
    ValueError for experts that are quantised in a way that is not supported.
    """

    def __init__(
        self,
        shape: MixtureShape,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        shape.check()
        method = _experts_method(quant_config, prefix)
        if _is_kept(quant_config, f"{prefix}.shared_expert.down_proj") != _is_kept(
            quant_config, f"{prefix}.experts"
        ):
            shape = replace(shape, may_stack_shared=False)
        group, self.replicas = get_tp_group(), get_dp_group()
        self.tp_size = group.world_size
        expert_ranks = self.replicas.world_size * self.tp_size
        config = get_current_vllm_config_or_none()
        expert_parallel = config is not None and _spreads_experts(config, expert_ranks)
        if expert_parallel:
            # Every token's, so its columns are shared.
            shape = replace(shape, may_stack_shared=False)
        self.expert_ranks = expert_ranks if expert_parallel else 1
        self.shape = shape
        self.layer_name = prefix
        self.copies: ExpertCopies | None = None
        if config is not None and expert_parallel and config.parallel_config.enable_eplb:
            num_redundant = config.parallel_config.eplb_config.num_redundant_experts
            self.copies = ExpertCopies(shape.num_experts, num_redundant, expert_ranks)
        counted = config is not None and config.observability_config.expert_counts
        counted = counted or self.copies is not None
        #: `[experts]` int64: tokens that each got, where the configuration asks for it; no buffer,
        #: for it is read while the others sleep
        self.counts = torch.zeros(shape.num_experts, dtype=torch.int64) if counted else None
        self.router = Router(shape)
        place, places = group.rank_in_group, self.tp_size
        if expert_parallel:
            place, places = self.replicas.rank_in_group * self.tp_size + place, expert_ranks
        self.experts = Experts(shape, method, place, places, expert_parallel, self.copies)
        self.exchange: ExpertExchange | None = None
        if self.replicas.world_size > 1:
            self.exchange = ExpertExchange(self.replicas, self.experts.first)
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if shape.latent_size:
            widths = (shape.hidden_size, shape.latent_size)
            self.fc1_latent_proj, self.fc2_latent_proj = (
                ReplicatedLinear(
                    *sizes, bias=False, quant_config=quant_config, prefix=f"{prefix}.{name}"
                )
                for name, sizes in (
                    ("fc1_latent_proj", widths),
                    ("fc2_latent_proj", widths[::-1]),
                )
            )
        self.shared_expert: GatedMLP | UngatedMLP | None = None
        if shape.shared is not None and not shape.stacks_shared:
            self.shared_expert = _shared_network(shape, f"{prefix}.shared_expert", quant_config)

    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`; `input_ids [tokens]` are read where they choose
        the experts."""
        return self._mix(x, self._route(self.router(x), input_ids))

    def after_norm(self, norm: RMSNorm, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        """The stream, added up, with the mixture of its norm as a branch; and its sum."""
        x, total = norm.enter(stream)
        routing = self._route(self.router(x), None)
        if not self.ends_with_slots:
            return ResidualStream(total, self._mix(x, routing)), total
        shared = None if self.shared_expert is None else self.shared_expert(x)
        problem = self._problem(x, routing, shared)
        return current_platform.kernels.run_experts_add(problem, total), total

    @property
    def ends_with_slots(self) -> bool:
        """Whether nothing comes after the sum over a token's slots."""
        return self.exchange is None and self.fc2_latent_proj is None and self.tp_size == 1

    def _route(self, logits: Tensor, input_ids: Tensor | None) -> Routing:
        shape = self.shape
        slots = None
        if self.counts is not None:
            # Those of any layer that has some tell tokens from padding.
            slots = next(iter(get_forward_context().slot_mapping.values()), None)
        added = None if shape.latent_size else shape.shared
        first = self.experts.first if self.exchange is None else 0
        routing = current_platform.kernels.route_experts(
            RoutingProblem(
                logits,
                shape.num_experts,
                shape.rule,
                self.router.e_score_correction_bias,
                added,
                self.counts,
                slots,
                first if self.copies is None else 0,
                self.router.chosen(input_ids),
            )
        )
        if self.copies is not None:
            routing = self.copies.choose(routing, logits, first)
        return routing

    def _mix(self, x: Tensor, routing: Routing) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        shape = self.shape
        shared = None if self.shared_expert is None else self.shared_expert(x)
        latent = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)[0]
        weighted = None if shape.latent_size else shared
        if self.exchange is None:
            out = current_platform.kernels.run_experts(self._problem(latent, routing, weighted))
        else:
            out = self._exchanged(self.exchange, latent, routing)
            if weighted is not None:
                out = (out + routing.weights[:, -1:] * weighted).to(out.dtype)
        if self.fc2_latent_proj is not None:
            # Linear, so that a rank's part of the sum may go through it.
            out = self.fc2_latent_proj(out)[0]
            out = out if shared is None else out + shared
        return tensor_model_parallel_all_reduce(out, in_place=True) if self.tp_size > 1 else out

    def _exchanged(self, exchange: ExpertExchange, x: Tensor, routing: Routing) -> Tensor:
        """The routed experts' part of the sum, of which other replicas have some."""
        top_k = self.shape.rule.top_k
        routed = Routing(routing.weights[:, :top_k].contiguous(), routing.experts[:, :top_k])
        rows, choices = exchange.gather(x, routed)
        return exchange.scatter(
            current_platform.kernels.run_experts(self._problem(rows, choices, None)), len(x)
        )

    def _problem(self, x: Tensor, routing: Routing, shared: Tensor | None) -> ExpertsProblem:
        """Of the experts of this rank."""
        experts, shape = self.experts, self.shape
        return ExpertsProblem(
            x,
            experts.gate_up_proj,
            experts.down_proj,
            routing,
            shared,
            gated=shape.gated,
            gate_up_bias=experts.gate_up_proj_bias,
            down_bias=experts.down_proj_bias,
            clamp=shape.clamp,
            scales=experts.method.scales(experts),
            ranks=self.expert_ranks,
        )

    def kernel_shapes(self) -> KernelShapes:
        """Of ranks that have a part of every expert."""
        experts, shape = self.experts, self.shape
        count, hidden, inner = experts.down_proj.shape
        scales = experts.method.scales(experts)
        one = ExpertsShape(
            count,
            shape.rule.top_k,
            hidden,
            inner,
            shared=shape.stacks_shared,
            gated=shape.gated,
            biases=shape.expert_biases,
            clamp=shape.clamp,
            scales=None if scales is None else (scales.gate_up.shape, scales.down.shape),
        )
        return KernelShapes(experts=(one,))

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`: each rank's part of every expert, or its experts, one sum; among
        replicas rows and choices there, and sums back."""
        found, shape = [], self.shape
        if self.exchange is not None:
            row, choices = shape.expert_width * element_bytes, shape.rule.top_k * _CHOICE_BYTES
            found = [
                Collective("all-gather", "experts", row, "replicas"),
                Collective("all-gather", "experts", choices, "replicas"),
                Collective("reduce-scatter", "experts", row, "replicas"),
            ]
        if self.tp_size > 1:
            found.append(Collective("all-reduce", "experts", shape.hidden_size * element_bytes))
        return found
