# SPDX-License-Identifier: Apache-2.0
"""Which placements of a supernet launch kernels that no step before launched.

A change of placement would otherwise spend most of its time on dummy steps whose kernels are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping

from torch import nn

from vllm.model_executor.layer_kinds import tensor_form
from vllm.v1.kv_cache_interface import KVCacheSpec

#: a mixer's kind after that of the layer before it
_Pair = tuple[Hashable, Hashable]


class Rehearsals:
    """What one worker's warm-up has run so far.

    Kernels follow from the kinds of state that there are together, and from each mixer and the one
    before it, which decides how it takes up the residual stream. They follow neither from how many
    layers have a mixer nor from where the memory has their blocks: strides are multiples of 256
    bytes in every plan.
    """

    def __init__(self) -> None:
        self._pairs: dict[frozenset[KVCacheSpec], set[_Pair]] = defaultdict(set)

    def add(self, specs: Collection[KVCacheSpec], mixers: Mapping[int, nn.Module]) -> bool:
        """Note a placement, of which `mixers` are those in use by layer; whether it is a new one.
        The first is, also that of a model whose layers have one mixer each."""
        state = frozenset(specs)
        is_new, pairs = state not in self._pairs, set(_pairs(mixers))
        is_new |= not pairs <= self._pairs[state]
        self._pairs[state] |= pairs
        return is_new


def _pairs(mixers: Mapping[int, nn.Module]) -> Iterator[_Pair]:
    """Of each layer; one with a mixer that is always the same is a kind of its own."""
    kinds: dict[int, Hashable] = {layer: _kind(mixer) for layer, mixer in mixers.items()}
    for layer, kind in kinds.items():
        yield kinds.get(layer - 1, layer - 1), kind


def _kind(mixer: nn.Module) -> Hashable:
    """Equal for mixers whose steps differ in weights only, given the same kind of state."""
    return type(mixer), *((name, *tensor_form(one)) for name, one in mixer.named_parameters())
