# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the kernels, and their files: one per GPU, shipped or the user's own.

Tables are keyed by the padded head dimension; wider keys serve narrower heads. fp32 activations
have their own rows: twice the shared memory, and no tensor cores. Attention reads keys through the
block table, which takes every second pipeline stage: `2 n + 1` stages keep `n` key tiles in shared
memory.

Those of mixtures of experts are keyed by the rows of a block of tokens.

A JSON file names the GPU it was measured on and its compute capability (null: any GPU), and gives
one value per field of `Configs`: a number, a tile, or tiles by padded head dimension.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

SHIPPED = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Tile:
    """`rows` x `columns` of the kernel's main tile, and Triton's launch parameters."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


Table = dict[int, Tile]


@dataclass(frozen=True)
class Configs:
    """One GPU's tables; attention tiles are (query rows, keys), GDN tiles (keys dims, dv).

    Attention of short queries: `attention_decode_few` where sequences share the keys' heads among
    at most one program per multiprocessor, `attention_decode_many` where they are more than two
    or take uneven turns.
    Tiles of experts are (columns of the weight at once, outputs); both tables have the same keys.
    """

    multiprocessors: int
    attention_prefill: Table
    attention_prefill_fp32: Table
    attention_decode: Table
    attention_decode_few: Table
    attention_decode_many: Table
    attention_decode_fp32: Table
    gdn_decode: Tile
    gdn_state: Table
    gdn_state_fp32: Table
    gdn_intra: Tile
    gdn_fp32_warps: int
    conv1d: Tile
    moe_gate_up: Table
    moe_down: Table
    moe_fp32: Tile


def pick(table: Table, head_dim: int) -> Tile:
    """The row for `head_dim`: the smallest key that holds it.

    Raises:
        ValueError: `head_dim` exceeds the widest supported tile.
    """
    for width in sorted(table):
        if head_dim <= width:
            return table[width]
    raise ValueError(f"head dimension {head_dim} exceeds the supported {max(table)}")


class TileFileError(ValueError):
    """A file of launch parameters that cannot be used; the message names the file and the key."""


@dataclass(frozen=True)
class TileFile:
    """`configs` as measured on `gpu` of compute `capability`; both None: fit for any GPU."""

    gpu: str | None
    capability: tuple[int, int] | None
    configs: Configs


def file_name(gpu: str | None) -> str:
    """Where a folder keeps the parameters of a GPU; None for those that fit any."""
    return f"{(gpu or 'small').replace(' ', '_').replace('/', '_')}.json"


def read_tile_file(path: Path) -> TileFile:
    """Parse one file.

    Raises:
        TileFileError: not such a file, or a key is missing, unknown or of another form.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        gpu, capability, tiles = content["gpu"], content["capability"], content["tiles"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TileFileError(f"{path}: not a file of launch parameters ({error!r})") from error
    known = get_type_hints(Configs)
    wrong = sorted(known.keys() ^ tiles.keys())
    if wrong:
        word = "missing" if wrong[0] in known else "unknown"
        raise TileFileError(f"{path}: {word} key {wrong[0]!r}; `vllm tune` writes all of them")
    values: dict[str, Any] = {}
    for name, kind in known.items():
        try:
            values[name] = _PARSERS[kind](tiles[name])
        except (TypeError, ValueError, AttributeError) as error:
            raise TileFileError(f"{path}: {name!r} is malformed ({error})") from error
    return TileFile(gpu, None if capability is None else tuple(capability), Configs(**values))


def write_tile_file(path: Path, file: TileFile) -> None:
    """Write a file that `read_tile_file` reads back as `file`; one line per tile."""
    tiles = {f.name: getattr(file.configs, f.name) for f in fields(Configs)}
    rows = ",\n".join(f"    {json.dumps(name)}: {_text(value)}" for name, value in tiles.items())
    path.write_text(
        f'{{\n  "gpu": {json.dumps(file.gpu)},\n  "capability": {json.dumps(file.capability)},\n'
        f'  "tiles": {{\n{rows}\n  }}\n}}\n',
        encoding="utf-8",
    )


def _int(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"expected a positive number, got {value!r}")
    return value


def _tile(value: Any) -> Tile:
    return Tile(**{name: _int(number) for name, number in value.items()})


def _table(value: Any) -> Table:
    return {int(width): _tile(tile) for width, tile in value.items()}


_PARSERS: dict[Any, Callable[[Any], Any]] = {int: _int, Tile: _tile, Table: _table}


def _text(value: int | Tile | dict[int, Tile]) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Tile):
        return json.dumps(asdict(value))
    rows = ",\n".join(f'      "{width}": {_text(tile)}' for width, tile in value.items())
    return f"{{\n{rows}\n    }}"
