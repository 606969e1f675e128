# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in every float8 format, and the same numbers as a 16-bit-style checkpoint."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm.kernels import fp8

FP8 = fp8.FP8
Format = Literal["tensor", "static", "block", "compressed", "modelopt", "compressed block"]
#: of every kind of weight; "modelopt" is "static" by another name, "compressed block" is "block"
FORMATS: tuple[Format, ...] = ("tensor", "static", "block", "compressed")

#: activation scale of "static" checkpoints
STATIC_SCALE = 0.05

_CONFIGS: dict[Format, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "dynamic": False},
                "input_activations": {"type": "float", "num_bits": 8, "dynamic": False},
            }
        },
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
        "producer": {"name": "modelopt", "version": "0.37.0"},
    },
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                "input_activations": {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    },
}
_BLOCKS = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
_GROUPS = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True}
_CONFIGS["compressed block"] = {
    **_CONFIGS["compressed"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _BLOCKS, "input_activations": _GROUPS}
    },
}
_IGNORE_KEY = dict.fromkeys(("compressed", "compressed block", "modelopt"), "ignore")


@dataclass(frozen=True)
class Quantised:
    """The float8 checkpoint, and one with the dequantised weights in fp32."""

    path: Path
    dequantised: Path


def _is_linear(name: str, tensor: Tensor) -> bool:
    if ".experts." in name:
        return tensor.dim() == 2
    if "_linear.weight" in name:  # of Granite; those of all experts are one tensor
        return True
    return name.endswith("_proj.weight") or ("in_proj" in name and tensor.dim() == 2)


def _expand(scale: Tensor, shape: torch.Size) -> Tensor:
    """128 x 128 blocks to elements."""
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide[: shape[0], : shape[1]]


def block_scales(weight: Tensor) -> Tensor:
    """`[ceil(n / 128), ceil(k / 128)]`, each block's largest value to 448."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, 128, columns, 128).abs().amax((1, 3)).clamp(min=1e-6) / 448


def quantise(weight: Tensor, form: Format) -> tuple[dict[str, Tensor], Tensor]:
    """`({suffix: tensor}, dequantised weight)`."""
    weight = weight.float()
    if form in ("block", "compressed block"):
        scale = block_scales(weight)
        values = (weight / _expand(scale, weight.shape)).to(FP8)
        stored = {"weight": values, f"weight_scale{'_inv' if form == 'block' else ''}": scale}
        return stored, values.float() * _expand(scale, weight.shape)
    if form == "compressed":
        values, scale = fp8.quantize_rows(weight.flatten(0, -2))
        values, scale = values.view_as(weight), scale.view(*weight.shape[:-1], 1)
    else:
        scale = weight.abs().max().reshape(()) / 448
        values = (weight / scale).to(FP8)
    stored = {"weight": values, "weight_scale": scale}
    if form in ("static", "modelopt"):
        stored["input_scale"] = torch.tensor(STATIC_SCALE)
    return stored, values.float() * scale


def quantise_checkpoint(
    source: Path, target: Path, form: Format, keep: tuple[str, ...] = ()
) -> Quantised:
    """Quantise the linear layers of a tiny checkpoint but those whose names end in `keep`."""
    tensors = load_file(source / "model.safetensors")
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not _is_linear(name, tensor) or module.endswith(keep or ("\0",)):
            stored[name] = plain[name] = tensor
            continue
        parts, plain[name] = quantise(tensor, form)
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    kept = sorted(
        n.removesuffix(".weight") for n in tensors if n.endswith(tuple(f"{k}.weight" for k in keep))
    )
    config = copy.deepcopy(_CONFIGS[form])
    if form == "compressed" and any("block_sparse_moe.input_linear" in name for name in tensors):
        targets = config["config_groups"]["group_0"]["targets"]
        targets.append("GraniteMoeHybridParallelExpertsLinear")
    config = {**config, _IGNORE_KEY.get(form, "modules_to_not_convert"): [*kept, "lm_head"]}
    return Quantised(
        _write(source, target / "fp8", stored, config),
        _write(source, target / "plain", plain, None),
    )


def _write(source: Path, target: Path, tensors: dict[str, Tensor], config: Any) -> Path:
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((target / "config.json").read_text())
    if config is not None:
        data["quantization_config"] = config
    (target / "config.json").write_text(json.dumps(data))
    return target
