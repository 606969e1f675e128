# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint tensor becomes this process's part of a parameter.

A parameter is a row of *sections*, one per matrix it fuses (q, k and v; gate and up). Each section
is cut into parts along the sharded dimension; a tensor-parallel rank holds one part of each. The
same description loads separate tensors (a shard id names the section), several consecutive
sections stored as one tensor (a tuple of ids) and an already fused tensor (no id).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import per_rank

ShardId = str | int
WeightLoader = Callable[..., None]
#: in a stack of experts, the one that every token goes through; the others have numbers
SHARED_EXPERT = "shared"


@dataclass
class ExpertStack:
    """Which matrices lie in this process's stack: those of some of the `num_experts` routed
    `experts`, by number, and then, if `shared`, that of the shared one. Experts may change, not how
    many they are; what is loaded later are the new ones'."""

    num_experts: int
    experts: tuple[int, ...]
    shared: bool

    @property
    def count(self) -> int:
        return len(self.experts)

    @property
    def size(self) -> int:
        return self.count + self.shared

    @property
    def names(self) -> tuple[ShardId, ...]:
        """Of the experts that a checkpoint may have one by one, other processes' too."""
        return (*range(self.num_experts), *([SHARED_EXPERT] if self.shared else []))

    def place(self, expert: ShardId) -> int | None:
        """Where an expert's matrix lies, None in another process."""
        if expert == SHARED_EXPERT:
            return self.count
        return self.experts.index(int(expert)) if int(expert) in self.experts else None

    def part(self, loaded: Tensor) -> Tensor:
        """Of all routed experts' `loaded [experts, ...]`, those in this process.

        Raises WeightShapeError.
        """
        if loaded.dim() == 0 or len(loaded) != self.num_experts:
            raise WeightShapeError((self.num_experts, *loaded.shape[1:]), loaded.shape)
        first = self.experts[0]
        if self.experts == tuple(range(first, first + self.count)):
            return loaded[first : first + self.count]
        return loaded[list(self.experts)]


class WeightShapeError(ValueError):
    """A checkpoint tensor does not fit its parameter."""

    def __init__(self, expected: Sequence[int], found: Sequence[int]) -> None:
        super().__init__(f"expected shape {list(expected)}, found {list(found)}")
        self.shapes = tuple(expected), tuple(found)

    def __reduce__(self) -> tuple[type[WeightShapeError], tuple[tuple[int, ...], ...]]:
        return type(self), self.shapes


class WeightDtypeError(ValueError):
    """A checkpoint tensor has an element type that its parameter cannot take."""


class WeightShardError(ValueError):
    """A checkpoint tensor is said to be a shard that its parameter does not have."""

    def __init__(self, shard_id: ShardId, known: Sequence[ShardId]) -> None:
        has = f"has the shards {list(known)}" if known else "is no fused one"
        super().__init__(f"given as shard {shard_id!r} of a parameter that {has}")
        self.shards = shard_id, tuple(known)

    def __reduce__(self) -> tuple[type[WeightShardError], tuple[ShardId, tuple[ShardId, ...]]]:
        return type(self), self.shards


@dataclass(frozen=True)
class Section:
    """`size` rows in the checkpoint, cut into `parts`, of which this process holds `part`."""

    shard_id: ShardId
    size: int
    parts: int = 1
    part: int = 0

    @property
    def local_size(self) -> int:
        return per_rank("rows or columns of a weight", self.size, self.parts)


def sharded_section(size: int) -> Section:
    """All of one matrix, cut over the tensor-parallel group."""
    group = get_tp_group()
    return Section(0, size, group.world_size, group.rank_in_group)


def local_size(sections: Sequence[Section]) -> int:
    """Rows of the parameter in this process."""
    return sum(section.local_size for section in sections)


@dataclass(frozen=True)
class WeightLayout:
    """This process's part of a matrix `[out, in]`: parts of its rows, or of its columns."""

    rows: tuple[Section, ...]
    columns: Section

    @property
    def shape(self) -> tuple[int, int]:
        return local_size(self.rows), self.columns.local_size

    @property
    def split(self) -> tuple[tuple[Section, ...], int]:
        """The sections of the sharded dimension, and which one it is."""
        return ((self.columns,), 1) if self.columns.parts > 1 else (self.rows, 0)

    def loader(self) -> WeightLoader:
        """A weight loader for the matrix."""
        return sections_loader(*self.split)


def default_weight_loader(param: Tensor, loaded: Tensor, shard_id: ShardId | None = None) -> None:
    """Copy a whole tensor, converting dtype and device.

    Raises WeightShapeError, and WeightShardError for any shard; a checkpoint's single element may
    be 0-d or 1-d.
    """
    if shard_id is not None:
        raise WeightShardError(shard_id, ())
    if param.shape != loaded.shape and not param.numel() == 1 == loaded.numel():
        raise WeightShapeError(param.shape, loaded.shape)
    param.data.copy_(loaded.reshape(param.shape))


def load_sections(
    param: Tensor,
    loaded: Tensor,
    shard_id: ShardId | tuple[ShardId, ...] | None = None,
    *,
    sections: tuple[Section, ...],
    dim: int = 0,
) -> None:
    """Copy this process's part of one, some or all sections into `param` along `dim`.

    Raises WeightShapeError naming the shape the checkpoint should have had, WeightShardError for
    an unknown shard id.
    """
    for start, part in local_parts(param.shape, loaded, shard_id, sections, dim):
        param.data.narrow(dim, start, part.shape[dim]).copy_(part)


def wanted_sections(
    shard_id: ShardId | tuple[ShardId, ...] | None, sections: Sequence[Section]
) -> tuple[Section, ...]:
    """The sections that a shard id names; WeightShardError for an unknown one."""
    if shard_id is None:
        return tuple(sections)
    known = {section.shard_id: section for section in sections}
    wanted = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    for one in wanted:
        if one not in known:
            raise WeightShardError(one, tuple(known))
    return tuple(known[one] for one in wanted)


def local_parts(
    shape: Sequence[int],
    loaded: Tensor,
    shard_id: ShardId | tuple[ShardId, ...] | None,
    sections: Sequence[Section],
    dim: int,
) -> Iterator[tuple[int, Tensor]]:
    """`(start in the parameter, this process's part of a section)` for what `loaded` holds.

    `shape`: the parameter's. Raises as `load_sections`.
    """
    wanted = wanted_sections(shard_id, sections)
    expected = list(shape)
    expected[dim] = sum(section.size for section in wanted)
    if list(loaded.shape) != expected:
        raise WeightShapeError(expected, loaded.shape)
    starts = _local_starts(sections)
    source = 0
    for section in wanted:
        size = section.local_size
        yield starts[section.shard_id], loaded.narrow(dim, source + section.part * size, size)
        source += section.size


def _local_starts(sections: Sequence[Section]) -> dict[ShardId, int]:
    starts: dict[ShardId, int] = {}
    position = 0
    for section in sections:
        starts[section.shard_id] = position
        position += section.local_size
    return starts


def sections_loader(sections: Sequence[Section], dim: int = 0) -> WeightLoader:
    """A weight loader for a parameter made of `sections` along `dim`."""
    return partial(load_sections, sections=tuple(sections), dim=dim)


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """An uninitialised inference parameter on the current default device."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
