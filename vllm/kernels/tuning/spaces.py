# SPDX-License-Identifier: Apache-2.0
"""What is tuned: for each table, the alternatives and the workloads that they are timed on."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from vllm.kernels.attention import SHORT_ROWS
from vllm.kernels.triton.tile_files import Tile
from vllm.kernels.tuning.shapes import (
    DEFAULT,
    WIDTHS,
    AttentionShape,
    DeltaRuleShape,
    KernelShapes,
)
from vllm.kernels.tuning.workloads import Run, Workloads


@dataclass(frozen=True)
class Space:
    """The alternatives for one tile: field `field` of `Configs`, row `width` of its table.

    `width` None: the field is a tile, not a table. `workloads` make what is timed, of a `shape`,
    all of which reads this tile; none where the shapes have no such kernel.
    """

    field: str
    width: int | None
    tiles: tuple[Tile, ...]
    workloads: tuple[partial[Run], ...]

    @property
    def name(self) -> str:
        return self.field if self.width is None else f"{self.field}.{self.width}"

    @property
    def sizes(self) -> list[str]:
        """Of the kernels that are timed."""
        return list(dict.fromkeys(str(make.keywords["shape"]) for make in self.workloads))

    def runs(self, workloads: Workloads) -> list[Run]:
        """What is timed, one of each shape and batch."""
        return [make(workloads) for make in self.workloads]


def spaces(shapes: KernelShapes = DEFAULT) -> list[Space]:
    """Every tile that can be tuned, for kernels of these `shapes`. fp32 tables are not: no model
    serves in fp32 on a GPU."""
    found: list[Space] = []
    for width in WIDTHS:
        found += _attention(width, [s for s in shapes.attention if s.width == width])
        found.append(_delta_state(width, [s for s in shapes.delta_rules if s.width == width]))
    return [*found, *_delta_rule(shapes), _convolution(shapes), *_experts(shapes)]


def _grid(*choices: tuple[int, ...]) -> tuple[Tile, ...]:
    return tuple(Tile(*values) for values in product(*choices))


_PREFILL_TILES = tuple(
    Tile(rows, columns, warps, stages)
    for rows, columns, warps in ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8),
                                 (128, 128, 8))
    for stages in (3, 5)
)  # fmt: skip
_DECODE_TILES = _grid((16,), (32, 64, 128), (2, 4, 8), (3, 5, 7))
_PREFILLS = ([(4096, 4096)] * 2, [(512, 512)] * 16, [(2048, 12000)])
#: table -> batches: programs (key heads of all sequences), tokens and context of a sequence
_DECODES = {
    "attention_decode": ((256, 1, 1024), (256, 4, 1024)),
    "attention_decode_few": ((4, 1, 200), (4, 1, 12000), (32, 1, 200)),
    "attention_decode_many": ((1024, 1, 384), (1024, 1, 1024)),
}


def _attention(width: int, shapes: list[AttentionShape]) -> Iterator[Space]:
    prefills = tuple(
        partial(Workloads.attention, shape=shape, lengths=_prompts(shape, lengths))
        for shape in shapes
        for lengths in _PREFILLS
    )
    yield Space("attention_prefill", width, _PREFILL_TILES, prefills)
    for field, batches in _DECODES.items():
        decodes = tuple(
            partial(Workloads.attention, shape=shape, lengths=_decodes(shape, *batch))
            for shape in shapes
            if not shape.heads_apart
            for batch in batches
        )
        yield Space(field, width, _DECODE_TILES, decodes)


def _prompts(shape: AttentionShape, lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`lengths`, or one prompt of them as many times as there are heads apart."""
    return [lengths[0]] * shape.heads_apart if shape.heads_apart else lengths


def _decodes(
    shape: AttentionShape, programs: int, tokens: int, context: int
) -> list[tuple[int, int]]:
    """As many sequences as have about `programs` key heads: how many these are chooses the table.
    A sequence has fewer than `tokens` tokens where more are a prefill's."""
    tokens = min(tokens, max(1, SHORT_ROWS * shape.num_kv_heads // shape.num_heads))
    return [(tokens, context)] * max(1, programs // shape.num_kv_heads)


_PROMPTS = ([4096] * 2, [8192], [512] * 16)


def _delta_state(width: int, shapes: list[DeltaRuleShape]) -> Space:
    return Space(
        "gdn_state",
        width,
        _grid((width,), (32, 64, 128), (4, 8), (1, 2, 3, 4)),
        tuple(
            partial(Workloads.delta_rule, shape=shape, lengths=lengths)
            for shape in shapes
            for lengths in _PROMPTS
        ),
    )


def _delta_rule(shapes: KernelShapes) -> Iterator[Space]:
    """Of any width."""
    yield Space(
        "gdn_intra",
        None,
        _grid((64,), (64,), (4, 8), (1,)),
        tuple(
            partial(Workloads.delta_rule, shape=shape, lengths=_PROMPTS[0])
            for shape in shapes.delta_rules
        ),
    )
    yield Space(
        "gdn_decode",
        None,
        _grid((8, 16, 32, 64), (256,), (1, 2, 4, 8), (1,)),
        tuple(
            partial(Workloads.delta_rule_tokens, shape=shape, num_seqs=num_seqs)
            for shape in shapes.delta_rules
            for num_seqs in (1, 8, 64, 256)
        ),
    )


def _convolution(shapes: KernelShapes) -> Space:
    return Space(
        "conv1d",
        None,
        _grid((16, 32, 64), (256, 512, 1024), (1, 2, 4), (1,)),
        tuple(
            partial(Workloads.convolution, shape=shape, lengths=lengths)
            for shape in shapes.convolutions
            for lengths in (_PROMPTS[0], _PROMPTS[2])
        ),
    )


#: rows of a block -> tokens that an expert gets in the mean where it has such blocks
_SHARES: dict[int, tuple[float, ...]] = {
    16: (1 / 32, 1 / 4, 2, 8),
    32: (18, 31),
    64: (36, 62),
    128: (72, 256),
}
_EXPERT_TILES = {
    "moe_gate_up": _grid((64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)),
    "moe_down": _grid((64, 128), (32, 64, 128, 256), (4, 8), (2, 3, 4)),
}


def _experts(shapes: KernelShapes) -> Iterator[Space]:
    for field, tiles in _EXPERT_TILES.items():
        for rows, shares in _SHARES.items():
            workloads = tuple(
                partial(Workloads.experts, shape=shape, tokens=tokens)
                for shape in shapes.experts
                for tokens in dict.fromkeys(map(shape.tokens_for, shares))
            )
            yield Space(field, rows, tiles, workloads)
