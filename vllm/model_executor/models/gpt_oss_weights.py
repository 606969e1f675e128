# SPDX-License-Identifier: Apache-2.0
"""The experts' weights of gpt-oss checkpoints, as those of single experts.

A checkpoint has all experts of a layer in one tensor, gate and up as every other row: in 16 bits as
`gate_up_proj [experts, hidden, 2 * intermediate]` and `down_proj [experts, intermediate, hidden]`,
or transposed in mxfp4 as `_blocks` and `_scales`; biases are `_bias [experts, rows]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm import decisions
from vllm.model_executor.layers.quantization.mxfp4 import METHOD, dequantised

_EXPERTS = ".mlp.experts."


def experts_apart(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors with those of experts under `Experts.CHECKPOINT_NAMES`, mxfp4 made
    `dtype` one expert after another. What has no partner passes as it is, to be reported."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, inside, part = name.partition(_EXPERTS)
        stack, _, kind = part.rpartition("_")
        if not inside:
            yield name, tensor
        elif part == "gate_up_proj_bias":
            yield name, torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
        elif part in ("gate_up_proj", "down_proj"):
            for expert, matrix in enumerate(tensor):
                yield from _of_one(layer, part, expert, matrix.t())
        elif kind in ("blocks", "scales"):
            waiting[name] = tensor
            pair = [
                waiting.get(f"{layer}{_EXPERTS}{stack}_{each}") for each in ("blocks", "scales")
            ]
            if pair[0] is None or pair[1] is None:
                continue
            decisions.record(
                f"{METHOD} experts",
                f"made {str(dtype).removeprefix('torch.')} while they load",
                f"no kernel multiplies {METHOD} weights",
                f"keeping {METHOD}, a quarter of the memory",
            )
            for expert, (blocks, scales) in enumerate(zip(*pair, strict=False)):
                yield from _of_one(layer, stack, expert, dequantised(blocks, scales, dtype))
            for each in ("blocks", "scales"):
                del waiting[f"{layer}{_EXPERTS}{stack}_{each}"]
        else:
            yield name, tensor
    yield from waiting.items()


def _of_one(layer: str, stack: str, expert: int, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`matrix [rows, columns]` of an expert, as its projections."""
    prefix = f"{layer}{_EXPERTS}{expert}"
    if stack == "down_proj":
        yield f"{prefix}.down_proj.weight", matrix
    else:
        yield f"{prefix}.gate_proj.weight", matrix[0::2]
        yield f"{prefix}.up_proj.weight", matrix[1::2]
