# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights that a step reads: what drafting costs beside verifying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.state_layers import modules_in_use


@dataclass(frozen=True)
class WeightsRead:
    """Of one rank, in bytes per step: the target's, and the drafter's by the number of drafts per
    request, from 0 on."""

    target: int
    drafter: tuple[int, ...]

    @classmethod
    def of(
        cls,
        target: nn.Module,
        drafter: nn.Module | None,
        num_passes: Sequence[int],
        own_head: bool,
    ) -> WeightsRead:
        """`drafter`: its own modules, run `num_passes[k]` times to make `k` drafts; its output head
        is its own (`own_head`), or the target's unless it has one. Of embeddings only single rows
        are read, unless they are output heads, too; of a mixture all experts count, as in large
        batches."""
        whole = _bytes(target) + _head_bytes(target)
        if drafter is None:
            return cls(whole, (0,) * len(num_passes))
        heads = (drafter,) if own_head else (drafter, target)
        once = _bytes(drafter) + _head_bytes(*heads)
        return cls(whole, tuple(passes * once for passes in num_passes))


def _bytes(model: nn.Module) -> int:
    """Of all parameters but those of embeddings and output heads, and of mixers that a supernet
    does not use."""
    modules = [module for _, module in modules_in_use(model)]
    tables = {
        id(weight)
        for module in modules
        if isinstance(module, VocabParallelEmbedding)
        for weight in module.parameters()
    }
    weights = {id(one): one for module in modules for one in module.parameters(recurse=False)}
    return sum(_size(weight) for key, weight in weights.items() if key not in tables)


def _head_bytes(*models: nn.Module) -> int:
    """Of the output head of the first model that has one; else of an embedding, which it is tied
    to."""
    tables = [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
    ]
    heads = [table for table in tables if isinstance(table, ParallelLMHead)]
    return sum(_size(weight) for table in (heads or tables)[:1] for weight in table.parameters())


def _size(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
