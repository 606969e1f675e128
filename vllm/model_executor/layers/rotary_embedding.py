# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoFormer, arXiv 2104.09864): the table of angles and its variants."""

import json
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm.config import get_current_vllm_config_or_none
from vllm.exceptions import VLLMValidationError

RopeParameters = Mapping[str, Any]


def _default(inv_freq: Tensor, rope: RopeParameters) -> Tensor:
    return inv_freq


def _linear(inv_freq: Tensor, rope: RopeParameters) -> Tensor:
    """Positions divided by `factor` (arXiv 2306.15595)."""
    return inv_freq / float(rope["factor"])


def _llama3(inv_freq: Tensor, rope: RopeParameters) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp in between."""
    factor, low, high, context = (float(rope[key]) for key in NEEDED["llama3"])
    wavelength = 2 * math.pi / inv_freq
    keep = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeParameters) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): pairs that turn fewer than `beta_slow` times in the
    original context are divided by `factor`, those that turn more than `beta_fast` times are kept,
    and in between the share kept is linear in the pair's index."""
    context, pairs = float(rope["original_max_position_embeddings"]), len(inv_freq)
    theta = math.log(float(rope["rope_theta"]))

    def pair_with(turns: float) -> float:
        return pairs * math.log(context / (turns * 2 * math.pi)) / theta

    first = pair_with(float(rope.get("beta_fast") or 32))
    last = pair_with(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = max(last - first, 0.001)
    index = torch.arange(pairs, dtype=torch.float32, device=inv_freq.device)
    divided = ((index - first) / width).clamp(0, 1)
    return divided * inv_freq / float(rope["factor"]) + (1 - divided) * inv_freq


def attention_factor(rope: RopeParameters) -> float:
    """What cosines and sines are multiplied by: YaRN's temperature (section 3.4), else 1."""
    if rope.get("rope_type", "default") != "yarn":
        return 1.0
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise VLLMValidationError(
            "rope_type 'yarn' with mscale is not supported; give attention_factor"
        )
    given = rope.get("attention_factor")
    factor = float(rope["factor"])
    if given is not None:
        return float(given)
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[Tensor, RopeParameters], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
#: by `rope_type`, the parameters without a default
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def inverse_frequencies(rotary_dim: int, rope: RopeParameters) -> Tensor:
    """Angle per position of each pair of dimensions, `[rotary_dim / 2]` fp32 on the CPU.

    Raises ValueError for an unknown `rope_type`, and for one without a parameter that it needs, or
    with one that is no number.
    """
    kind = rope.get("rope_type", "default")
    if kind not in _SCALINGS:
        raise VLLMValidationError(
            f"rope_type {kind!r} is not supported; supported: {sorted(_SCALINGS)}"
        )
    missing = [key for key in NEEDED[kind] if rope.get(key) is None]
    if missing:
        raise VLLMValidationError(
            f"rope_type {kind!r} needs {', '.join(missing)}; got {dict(rope)}"
        )
    for key in ("rope_theta", *NEEDED[kind]):
        if not isinstance(rope[key], int | float):
            raise VLLMValidationError(
                f"rope_parameters have {key} {rope[key]!r}; it must be a number"
            )
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
    return _SCALINGS[kind](inv_freq, rope)


class RotaryEmbedding(nn.Module):
    """NeoX-style rotation of the first `rotary_dim` dims of each head.

    `cos_sin_cache [max_position, rotary_dim]` fp32: the cosines, then the sines.
    `mrope_section` are the frequency counts of the temporal, height and width positions; text
    positions are equal in all three, so 1-d positions give the same rotation.
    """

    cos_sin_cache: Tensor

    def __init__(self, head_size: int, max_position: int, rope_parameters: RopeParameters) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = int(head_size * rope_parameters.get("partial_rotary_factor", 1.0))
        self.mrope_section = tuple(rope_parameters.get("mrope_section") or ())
        if self.mrope_section and sum(self.mrope_section) * 2 != self.rotary_dim:
            raise VLLMValidationError(
                f"mrope_section {list(self.mrope_section)} must sum to half of the rotary "
                f"dimension {self.rotary_dim}"
            )
        inv_freq = inverse_frequencies(self.rotary_dim, rope_parameters)
        factor = attention_factor(rope_parameters)
        device = torch.get_default_device()
        if device.type == "meta":
            # It has no values, and `arange` would import torch's compiler there, for seconds.
            table = torch.empty(max_position, 2 * len(inv_freq), dtype=torch.float32)
        else:
            # Computed on the CPU, so that every device has the same table.
            positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, inv_freq)
            table = torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
        self.register_buffer("cos_sin_cache", table.to(device), persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated `query, key [tokens, heads * head_size]` (or `[tokens, heads, head_size]`).

        For models that call rotation and attention separately; `positions [tokens]` int64.
        """
        if positions.dim() != 1:
            raise ValueError("multimodal (2-d) positions are not supported; pass text positions")
        angles = self.cos_sin_cache[positions]
        return self._rotate(query, angles), self._rotate(key, angles)

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, self.head_size)
        half = self.rotary_dim // 2
        cos, sin = angles[:, None, :half], angles[:, None, half:]
        first, second = heads[..., :half].float(), heads[..., half : self.rotary_dim].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned.to(x.dtype), heads[..., self.rotary_dim :]], dim=-1).view(x.shape)


_shared: weakref.WeakValueDictionary[str, RotaryEmbedding] = weakref.WeakValueDictionary()


def no_rope(head_size: int, max_position: int) -> RotaryEmbedding:
    """A rotary embedding that turns nothing, for attention without positions (NoPE)."""
    return get_rope(head_size, max_position, rope_parameters={"partial_rotary_factor": 0.0})


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: RopeParameters | None = None,
) -> RotaryEmbedding:
    """The rotary embedding of a config's `rope_parameters`, shared by the layers of one model.

    Raises ValueError for an unsupported rotation.
    """
    if not is_neox_style:
        raise VLLMValidationError(
            "interleaved (GPT-J) rotation is not supported; only NeoX style is"
        )
    parameters = {"rope_theta": 10000.0, **(rope_parameters or {})}
    device = torch.get_default_device()
    # Another engine's table goes when that engine sleeps.
    model = id(get_current_vllm_config_or_none())
    key = json.dumps([model, head_size, max_position, parameters, str(device)], sort_keys=True)
    rope = _shared.get(key)
    if rope is None:
        rope = RotaryEmbedding(head_size, max_position, parameters)
        _shared[key] = rope
    return rope
