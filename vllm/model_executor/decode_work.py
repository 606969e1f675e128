# SPDX-License-Identifier: Apache-2.0
"""What each part of a built model does in a decode step, for `vllm.v1.core.decode_cost`.

The modules say it: parameters by their sizes, layers with state by their specs. A model on the
`meta` device will do.
"""

from dataclasses import dataclass, field, replace

from torch import nn

from vllm.config import VllmConfig
from vllm.distributed.collective import Collective, Communicates
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, KeepsJournal
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.mlp import GatedMLP, UngatedMLP
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import MissingLayer
from vllm.model_executor.state_layers import collect_layers, modules_in_use
from vllm.v1.core.decode_cost import ExpertsWork, PartWork, StateWork
from vllm.v1.kv_cache_interface import MambaSpec

#: kernels of a mixture beside its router's product: routing, sorting, two products
_MIXTURE_LAUNCHES = 4
#: of the choice among copies of experts
_CHOICE_LAUNCHES = 8
#: of an exchange among replicas, which begins with two copies and ends with a sum of their parts
_EXCHANGE_LAUNCHES = 4


def decode_work(
    vllm_config: VllmConfig, model: nn.Module, *, makes_logits: bool = True
) -> list[PartWork]:
    """The parts of `model`, of one tensor-parallel rank: of each decoder layer the mixer that is in
    use, named by the kind of its state, and the rest; then what is outside of layers. A pipeline
    stage before the last makes no logits."""
    layers = {id(layer): layer for layer in collect_layers(vllm_config, model).values()}
    modules = list(modules_in_use(model))
    mixers = {_place(path) for path, module in modules if id(module) in layers}
    has_head = any(isinstance(module, ParallelLMHead) for _, module in modules)
    is_tied = makes_logits and not has_head
    parts: dict[tuple[str, str], _Part] = {}
    for path, module in modules:
        layer, child = _place(path)
        place = (layer, child if (layer, child) in mixers else "")
        part = parts.setdefault(place, _Part(in_layer=bool(layer), is_mixer=bool(place[1])))
        part.add(module, multiplies_embedding=is_tied)
        if id(module) in layers:
            part.keep(vllm_config, layers[id(module)])
    outside = parts.pop(("", ""), _Part())
    return [part.work() for part in (*parts.values(), outside)]


def num_layers(model: nn.Module) -> int:
    """Decoder layers that the model, or this pipeline stage of it, has."""
    own = (path for path, m in model.named_modules() if not isinstance(m, MissingLayer))
    return len({layer for layer, _ in map(_place, own) if layer})


def _place(path: str) -> tuple[str, str]:
    """The path of the decoder layer that a module is in, and the child of it that it belongs to;
    both empty outside of layers, which are numbered."""
    names = path.split(".")
    number = next((i for i, name in enumerate(names) if name.isdigit()), None)
    if number is None:
        return "", ""
    return ".".join(names[: number + 1]), ".".join(names[number + 1 : number + 2])


@dataclass
class _Part:
    """Adds up the modules of one part."""

    in_layer: bool = False
    is_mixer: bool = False
    labels: list[str] = field(default_factory=list)
    weight_bytes: int = 0
    flops: int = 0
    head_flops: int = 0
    launches: int = 0
    states: list[StateWork] = field(default_factory=list)
    experts: list[ExpertsWork] = field(default_factory=list)

    def add(self, module: nn.Module, multiplies_embedding: bool) -> None:
        """A module without its children; of an embedding a few rows are read, which do not count,
        unless it is the output head, too."""
        sizes = [p.numel() * p.element_size() for p in module.parameters(recurse=False)]
        if isinstance(module, MixtureOfExperts):
            # The stack's shared expert, if it has one, is read in any case.
            self._add_experts(module)
        elif isinstance(module, VocabParallelEmbedding):
            self.launches += 1
            if isinstance(module, ParallelLMHead) or multiplies_embedding:
                self.weight_bytes += sum(sizes)
                self.flops += 2 * module.weight.numel()
                self.head_flops += 2 * module.weight.numel()
        elif not isinstance(module, Experts):
            self.weight_bytes += sum(sizes)
        if isinstance(module, LinearBase):
            rows, columns = module.layout.shape
            self.flops += 2 * rows * columns
        if isinstance(module, Router):
            self.flops += 2 * module.weight.numel()
        # A mixer's norms are among its own kernels.
        norms = isinstance(module, RMSNorm) and not self.is_mixer
        counted = LinearBase | Router | GatedMLP | UngatedMLP
        self.launches += int(norms or isinstance(module, counted))

    def _add_experts(self, module: MixtureOfExperts) -> None:
        shape, experts = module.shape, module.experts
        tensors = list(experts.parameters())
        # With expert parallelism the stack is a part, and so are the tokens' slots.
        stacked = len(experts.gate_up_proj)
        routed = stacked - shape.stacks_shared
        expert_bytes = sum(p.numel() * p.element_size() for p in tensors) // stacked
        elements = (experts.gate_up_proj.numel() + experts.down_proj.numel()) // stacked
        slots = shape.num_experts
        if module.copies is not None:
            slots = len(module.copies.placement.slots)
        chosen = shape.rule.top_k * routed / slots
        replicas = module.replicas.world_size
        self.experts.append(ExpertsWork(routed, chosen, expert_bytes, replicas))
        self.weight_bytes += expert_bytes * shape.stacks_shared
        self.flops += round(2 * elements * (chosen * replicas + shape.stacks_shared))
        # The slots' sum is the next norm's, or a launch of its own.
        self.launches += _MIXTURE_LAUNCHES + (not module.ends_with_slots)
        self.launches += (module.copies is not None) * _CHOICE_LAUNCHES
        if replicas > 1:
            self.launches += _EXCHANGE_LAUNCHES + replicas

    def keep(self, vllm_config: VllmConfig, layer: AttentionLayerBase) -> None:
        """A layer with state."""
        spec = layer.get_kv_cache_spec(vllm_config)
        journal_bytes = 0
        if isinstance(layer, KeepsJournal):
            journal_bytes = layer.journal_shape(MambaSpec.expect(spec)).token_bytes
        interval = vllm_config.cache_config.commit_interval
        element_bytes = max(view.dtype.itemsize for view in spec.views)
        flops = layer.decode_flops_per_element / element_bytes
        work = StateWork.of(spec, flops, interval, journal_bytes)
        if layer.decode_tokens is not None:
            work = replace(work, window=layer.decode_tokens)
        self.states.append(work)
        self.labels.append(spec.label)
        self.launches += layer.decode_launches

    def work(self) -> PartWork:
        """With its kind."""
        kind = "embedding and head"
        if self.is_mixer:
            kind = " + ".join(self.labels)
        elif self.in_layer:
            kind = "experts and norms" if self.experts else "feed-forward and norms"
        return PartWork(
            kind,
            self.weight_bytes,
            self.flops,
            self.launches,
            tuple(self.states),
            tuple(self.experts),
            self.head_flops,
        )


def step_collectives(
    model: nn.Module, element_bytes: int, *, is_first: bool = True, is_last: bool = True
) -> list[Collective]:
    """Every collective of a step, in the order of the modules; of a pipeline stage, whether it is
    the first one, which embeds, and the last one, which makes logits, by the embedding if it has
    no head. An element of the activations takes `element_bytes`."""
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    found: list[Collective] = []
    for _, module in modules_in_use(model):
        if isinstance(module, VocabParallelEmbedding):
            is_head = isinstance(module, ParallelLMHead)
            if is_first and not is_head:
                found += module.collectives(element_bytes)
            if is_last and (is_head or not has_head):
                found += module.logits_collectives(element_bytes)
        elif isinstance(module, Communicates):
            found += module.collectives(element_bytes)
    return found
