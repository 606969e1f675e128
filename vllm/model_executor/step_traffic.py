# SPDX-License-Identifier: Apache-2.0
"""What a rank's part of a built model exchanges in a step, for `vllm.v1.core.layout_cost`.

A model on the `meta` device will do.
"""

from __future__ import annotations

from torch import nn

from vllm.distributed.collective import Collective, Communicates
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import HasPlacements


def step_collectives(
    model: nn.Module, element_bytes: int, *, is_first: bool = True, is_last: bool = True
) -> list[Collective]:
    """Every collective of a step, in the order of the modules; of a pipeline stage, whether it is
    the first one, which embeds, and the last one, which makes logits, by the embedding if it has
    no head. An element of the activations takes `element_bytes`."""
    unused: set[int] = set()
    if isinstance(model, HasPlacements):
        unused = {id(part) for mixer in model.unused_mixers() for part in mixer.modules()}
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    found: list[Collective] = []
    for module in model.modules():
        if id(module) in unused:
            continue
        if isinstance(module, VocabParallelEmbedding):
            is_head = isinstance(module, ParallelLMHead)
            if is_first and not is_head:
                found += module.collectives(element_bytes)
            if is_last and (is_head or not has_head):
                found += module.logits_collectives(element_bytes)
        elif isinstance(module, Communicates):
            found += module.collectives(element_bytes)
    return found
