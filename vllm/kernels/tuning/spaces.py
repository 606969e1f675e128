# SPDX-License-Identifier: Apache-2.0
"""What is tuned: for each table, the alternatives and the workloads that they are timed on."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from vllm.kernels.triton.tile_files import Tile
from vllm.kernels.tuning.workloads import Run, Workloads


@dataclass(frozen=True)
class Space:
    """The alternatives for one tile: field `field` of `Configs`, row `width` of its table.

    `width` None: the field is a tile, not a table. `runs` makes what is timed.
    """

    field: str
    width: int | None
    tiles: tuple[Tile, ...]
    runs: Callable[[Workloads], list[Run]]

    @property
    def name(self) -> str:
        return self.field if self.width is None else f"{self.field}.{self.width}"


def spaces() -> list[Space]:
    """Every tile that can be tuned. fp32 tables are not: no model serves in fp32 on a GPU."""
    found = [make(width) for width in (64, 128, 256) for make in _BY_WIDTH]
    experts = [make(rows) for make in (_gate_up, _down) for rows in _EXPERT_TOKENS]
    return [*found, _DELTA_INTRA, _DELTA_DECODE, _CONVOLUTION, *experts]


def _grid(*choices: tuple[int, ...]) -> tuple[Tile, ...]:
    return tuple(Tile(*values) for values in product(*choices))


def _prefill(width: int) -> Space:
    shapes = ([(4096, 4096)] * 2, [(512, 512)] * 16, [(2048, 12000)])
    tiles = tuple(
        Tile(rows, columns, warps, stages)
        for rows, columns, warps in ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8),
                                     (128, 128, 8))
        for stages in (3, 5)
    )  # fmt: skip
    return Space(
        "attention_prefill", width, tiles, lambda w: [w.attention(width, s) for s in shapes]
    )


def _decode_of(field: str, *shapes: list[tuple[int, int]]) -> Callable[[int], Space]:
    return lambda width: Space(
        field,
        width,
        _grid((16,), (32, 64, 128), (2, 4, 8), (3, 5, 7)),
        lambda w: [w.attention(width, shape) for shape in shapes],
    )


def _delta_state(width: int) -> Space:
    shapes = ([4096] * 2, [8192], [512] * 16)
    return Space(
        "gdn_state",
        width,
        _grid((width,), (32, 64, 128), (4, 8), (1, 2, 3, 4)),
        lambda w: [w.delta_rule(width, s) for s in shapes],
    )


#: rows of a block -> tokens of 256 experts, 8 of which they take, that have such blocks
_EXPERT_TOKENS = {16: (1, 8, 64, 256), 32: (512, 1000), 64: (1024, 2000), 128: (2304, 8192)}


def _gate_up(rows: int) -> Space:
    return _of_experts("moe_gate_up", rows, _grid((64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)))


def _down(rows: int) -> Space:
    return _of_experts("moe_down", rows, _grid((64, 128), (32, 64, 128, 256), (4, 8), (2, 3, 4)))


def _of_experts(field: str, rows: int, tiles: tuple[Tile, ...]) -> Space:
    counts = _EXPERT_TOKENS[rows]
    return Space(field, rows, tiles, lambda w: [w.experts(tokens) for tokens in counts])


_BY_WIDTH: tuple[Callable[[int], Space], ...] = (
    _prefill,
    _decode_of("attention_decode", [(1, 1024)] * 64, [(4, 1024)] * 64),
    _decode_of("attention_decode_few", [(1, 200)], [(1, 12000)], [(1, 200)] * 8),
    _decode_of("attention_decode_many", [(1, 384)] * 256, [(1, 1024)] * 256),
    _delta_state,
)
_DELTA_INTRA = Space(
    "gdn_intra", None, _grid((64,), (64,), (4, 8), (1,)), lambda w: [w.delta_rule(128, [4096] * 2)]
)
_DELTA_DECODE = Space(
    "gdn_decode",
    None,
    _grid((8, 16, 32, 64), (256,), (1, 2, 4, 8), (1,)),
    lambda w: [w.delta_rule_decode(128, n) for n in (1, 8, 64, 256)],
)
_CONVOLUTION = Space(
    "conv1d",
    None,
    _grid((16, 32, 64), (256, 512, 1024), (1, 2, 4), (1,)),
    lambda w: [w.convolution(lengths) for lengths in ([4096] * 2, [512] * 16)],
)
