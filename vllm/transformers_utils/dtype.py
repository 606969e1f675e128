# SPDX-License-Identifier: Apache-2.0
"""The dtype a checkpoint is stored in."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, dtype_from_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def checkpoint_dtype(
    model: str, config: PretrainedConfig, text_config: PretrainedConfig
) -> torch.dtype:
    """What the config states, else what most tensors of a local checkpoint have, else float32."""
    for part in (text_config, config):
        stated = part.dtype
        if isinstance(stated, torch.dtype):
            return stated
        if isinstance(stated, str) and stated.removeprefix("torch.") in STR_DTYPE_TO_TORCH_DTYPE:
            return dtype_from_name(stated)
    return safetensors_dtype(Path(model)) or torch.float32


def safetensors_dtype(directory: Path) -> torch.dtype | None:
    """The most common float dtype in the headers of a directory's first safetensors file."""
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        return None
    counts: Counter[torch.dtype] = Counter()
    for name, entry in read_safetensors_header(files[0]).items():
        if name != "__metadata__" and entry["dtype"] in _SAFETENSORS_DTYPES:
            counts[_SAFETENSORS_DTYPES[entry["dtype"]]] += 1
    return counts.most_common(1)[0][0] if counts else None


def read_safetensors_header(path: Path) -> dict[str, dict[str, str]]:
    """The JSON header: 8 bytes little-endian length, then that many bytes; `{}` if unreadable."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return {}
        (length,) = struct.unpack("<Q", prefix)
        if length > path.stat().st_size:
            return {}
        try:
            header: dict[str, dict[str, str]] = json.loads(file.read(length))
        except ValueError:
            return {}
    return header
