# SPDX-License-Identifier: Apache-2.0
"""Float8 checkpoints, as their `quantization_config` says, and 16-bit ones made float8."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import nn

from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.kernels.fp8 import GROUP
from vllm.model_executor.layers.quantization.base import (
    ExpertsMethod,
    LinearMethod,
    QuantizationConfig,
)
from vllm.model_executor.layers.quantization.fp8_block import Fp8BlockMethod
from vllm.model_executor.layers.quantization.fp8_experts import Fp8ExpertsMethod
from vllm.model_executor.layers.quantization.fp8_rows import Fp8RowsMethod
from vllm.model_executor.layers.quantization.unquantized import (
    UnquantizedExpertsMethod,
    UnquantizedLinearMethod,
)

#: projections narrower than this stay as they are when a 16-bit checkpoint is quantised
_SMALL_ROWS = 128
#: `scale_fmt` of scales that have an exponent alone
_POWERS_OF_TWO = "ue8m0"
#: kinds of layers in compressed-tensors checkpoints; the second is llm-compressor's for Granite
_TARGETS = frozenset({"Linear", "GraniteMoeHybridParallelExpertsLinear"})
#: ModelOpt's algorithm with a scale per output row and per token
_PER_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"


class Fp8Config(QuantizationConfig):
    """`weights`: scales per output row ("rows": also one per matrix, or quantised at load) or per
    128 x 128 block. `static`: activation scales of linear layers come from the checkpoint, else,
    and those of experts, from each token."""

    name = "fp8"

    def __init__(
        self,
        weights: Literal["rows", "block"] = "rows",
        *,
        static: bool = False,
        from_16_bit: bool = False,
        excluded: Collection[str] = (),
        suffixes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(excluded)
        self.weights = weights
        self.static = static
        self.from_16_bit = from_16_bit
        self.suffixes = suffixes or {}

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod:
        if self.is_excluded(prefix):
            return UnquantizedLinearMethod()
        if self.weights == "block":
            return Fp8BlockMethod()
        return Fp8RowsMethod(static=self.static, from_16_bit=self.from_16_bit)

    def get_experts_method(self, prefix: str) -> ExpertsMethod:
        if self.is_excluded(prefix):
            return UnquantizedExpertsMethod()
        if self.static:
            decisions.record(
                "scales of float8 experts' activations",
                "per token",
                "experts' kernels have no fixed ones",
                instead_of="the checkpoint's input_scale of each matrix",
            )
        return Fp8ExpertsMethod(
            self.weights, from_16_bit=self.from_16_bit, drops_input_scales=self.static
        )

    def leaves_small(self, rows: int) -> bool:
        """When quantising here: what is too small to gain from it."""
        small = self.from_16_bit and rows < _SMALL_ROWS
        if small:
            why = "there is little to gain, and gates need the precision"
            decisions.record(f"projections of fewer than {_SMALL_ROWS} features", "16 bit", why)
        return small


def fp8_at_load() -> Fp8Config:
    """For a 16-bit checkpoint."""
    return Fp8Config(from_16_bit=True)


def fp8_from_checkpoint(stored: Mapping[str, Any]) -> Fp8Config:
    """`quant_method` "fp8" of a `quantization_config`; ValueError for a variant not supported."""
    _require(stored, "activation_scheme", ("dynamic", "static"), "dynamic")
    _require(stored, "fmt", ("e4m3",), "e4m3")
    _require(stored, "scale_fmt", ("float", _POWERS_OF_TWO), "float")
    _require(stored, "expert_dtype", ("fp8", "fp4"), "fp8")
    excluded = _listed(stored, "modules_to_not_convert", "ignored_layers", "ignore")
    if stored.get("expert_dtype") == "fp4":
        # `mxfp4.without_packing` makes them 16-bit.
        excluded.append("experts")
    if stored.get("scale_fmt") == _POWERS_OF_TWO:
        decisions.record(
            "scales of float8 activations",
            "the largest value over 448",
            "kernels scale activations of all float8 checkpoints alike",
            instead_of="the power of two above it, as the checkpoint's scale_fmt says",
        )
    static = stored.get("activation_scheme") == "static"
    block = stored.get("weight_block_size")
    if block is None:
        suffixes = {".weight_scale_inv": ".weight_scale", ".activation_scale": ".input_scale"}
        return Fp8Config(static=static, excluded=excluded, suffixes=suffixes)
    if block != [GROUP, GROUP] or static:
        raise VLLMValidationError(
            f"fp8 weights in blocks of {block} with {stored.get('activation_scheme')} "
            f"activation scales are not supported; supported: [{GROUP}, {GROUP}], dynamic"
        )
    return Fp8Config("block", excluded=excluded)


def _listed(stored: Mapping[str, Any], *keys: str) -> list[str]:
    """The names under all of `keys`: writers of checkpoints differ in which they use."""
    for key in keys:
        found = stored.get(key) or []
        if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
            raise VLLMValidationError(
                f"the checkpoint's quantization_config has {key} {found!r}; it must be a list of "
                "names"
            )
    return list(dict.fromkeys(name for key in keys for name in stored.get(key) or ()))


def _require(stored: Mapping[str, Any], key: str, supported: tuple[str, ...], default: str) -> None:
    found = stored.get(key) or default
    if found not in supported:
        raise VLLMValidationError(
            f"the checkpoint's quantization_config has {key} {found!r}; supported: "
            + ", ".join(supported)
        )


def fp8_from_modelopt(stored: Mapping[str, Any]) -> Fp8Config:
    """NVIDIA ModelOpt's `quantization_config`, or the `quantization` of its `hf_quant_config.json`.

    Raises ValueError for an algorithm other than `FP8` (one scale per matrix, and one of its input)
    and `FP8_PER_CHANNEL_PER_TOKEN`.
    """
    _require(stored, "quant_algo", ("FP8", _PER_CHANNEL), "none")
    _require(stored, "kv_cache_quant_algo", ("FP8",), "FP8")
    excluded = _listed(stored, "ignore", "exclude_modules")
    config = Fp8Config(static=stored.get("quant_algo") != _PER_CHANNEL, excluded=excluded)
    config.name = "modelopt"
    return config


def fp8_from_compressed_tensors(stored: Mapping[str, Any]) -> Fp8Config:
    """A compressed-tensors `quantization_config` that is one group of float8 Linear weights, those
    of Granite's stacked experts (`_TARGETS`) included or not.

    Raises ValueError for anything else, naming what was found.
    """
    _refuse_more_than_scales(stored)
    groups = _groups(stored)
    targets = [group.get("targets") or [] for group in groups]
    if len(targets) != 1 or "Linear" not in targets[0] or not _TARGETS.issuperset(targets[0]):
        raise VLLMValidationError(
            "compressed-tensors checkpoints are supported with one group of Linear layers; this "
            f"one has {len(groups)} group(s): {targets}"
        )
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    kinds = [(part.get("type"), part.get("num_bits")) for part in (weights, inputs)]
    strategy, token = weights.get("strategy"), inputs.get("strategy")
    static = not inputs.get("dynamic")
    pairs = {("tensor", "tensor"), ("channel", "tensor"), ("tensor", "token"), ("channel", "token")}
    pairs.add(("block", "group"))
    if kinds != [("float", 8)] * 2 or (strategy, token) not in pairs:
        raise VLLMValidationError(
            f"compressed-tensors weights {kinds[0]} per {strategy} with activations {kinds[1]} per "
            f"{token} are not supported; supported: 8-bit float per tensor or channel, with "
            "activations per tensor or token, or per block, with activations per group"
        )
    if not static and token == "tensor":
        raise VLLMValidationError("compressed-tensors: dynamic activation scales must be per token")
    excluded = _listed(stored, "ignore")
    config = Fp8Config(static=static, excluded=excluded)
    if strategy == "block":
        _check_blocks(weights.get("block_structure"), inputs.get("group_size"), static)
        suffixes = {".weight_scale": ".weight_scale_inv"}
        config = Fp8Config("block", excluded=excluded, suffixes=suffixes)
    config.name = "compressed-tensors"
    return config


def _groups(stored: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `config_groups`, whose names mean nothing."""
    found = stored.get("config_groups") or {}
    if not isinstance(found, Mapping) or not all(isinstance(g, Mapping) for g in found.values()):
        raise VLLMValidationError(
            f"compressed-tensors: config_groups {found!r}; it must be an object of objects"
        )
    return list(found.values())


def _refuse_more_than_scales(stored: Mapping[str, Any]) -> None:
    """ValueError for compressed-tensors weights that are left out where they are zero, or that are
    for rotated activations."""
    sparsity = (stored.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise VLLMValidationError(
            f"compressed-tensors: weights of sparsity format {sparsity!r} are not supported; "
            "supported: dense"
        )
    if (stored.get("transform_config") or {}).get("config_groups"):
        raise VLLMValidationError(
            "compressed-tensors: rotations of activations (transform_config) are not supported"
        )


def _check_blocks(block: object, group: object, static: bool) -> None:
    """ValueError for other blocks of weights and groups of activations than DeepSeek-V3's."""
    if block != [GROUP, GROUP] or group != GROUP or static:
        scales = "static" if static else "dynamic"
        raise VLLMValidationError(
            f"compressed-tensors blocks of {block} with {scales} activation scales by {group} are "
            f"not supported; supported: [{GROUP}, {GROUP}], dynamic by {GROUP}"
        )
