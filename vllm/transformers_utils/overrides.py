# SPDX-License-Identifier: Apache-2.0
"""Merging of user overrides into a model config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import merged

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: old names of entries of `rope_parameters`
_ROPE_DICT, _ROPE_ENTRY = "rope_scaling", "rope_theta"
#: keys that describe the checkpoint as a whole, never a part of it
_TOP_ONLY = frozenset({"architectures", "model_type"})


def apply_overrides(config: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Merge `overrides` in place; nested objects merge key by key.

    A key that only the text part has goes there; one that both have (as `dtype`) goes to both.
    """
    text = config.get_text_config(decoder=True)
    wraps = text is not config
    known, text_known = set(config.to_dict()), set(text.to_dict())
    for key, value in _modern_rope(overrides, text_known).items():
        in_text = wraps and key in text_known and key not in _TOP_ONLY
        if in_text:
            _merge_attribute(text, key, value)
        if not in_text or key in known:
            _merge_attribute(config, key, value)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        _fit_layer_types(text)


def _modern_rope(overrides: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """`rope_scaling` and `rope_theta` under their present name, `rope_parameters`."""
    result = dict(overrides)
    if "rope_parameters" not in known:
        return result
    rope: dict[str, Any] = {}
    if isinstance(result.get(_ROPE_DICT), Mapping):
        rope.update(result.pop(_ROPE_DICT))
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
    if _ROPE_ENTRY in result:
        rope[_ROPE_ENTRY] = result.pop(_ROPE_ENTRY)
    if rope:
        result["rope_parameters"] = merged(rope, result.get("rope_parameters", {}))
    return result


def _fit_layer_types(text: PretrainedConfig) -> None:
    """A smaller `num_hidden_layers` keeps the first layers' types; a larger one has no types."""
    layer_types = getattr(text, "layer_types", None)
    count = getattr(text, "num_hidden_layers", None)
    if not layer_types or count is None or count == len(layer_types):
        return
    if count > len(layer_types):
        raise VLLMValidationError(
            f"hf_overrides: num_hidden_layers {count} is more than the {len(layer_types)} entries "
            "of layer_types; override layer_types too",
            parameter="hf_overrides",
        )
    text.layer_types = layer_types[:count]


def _merge_attribute(config: PretrainedConfig, key: str, value: Any) -> None:
    from transformers import PretrainedConfig

    current = getattr(config, key, None)
    if isinstance(value, Mapping) and isinstance(current, PretrainedConfig):
        apply_overrides(current, value)
    elif isinstance(value, Mapping) and isinstance(current, Mapping):
        setattr(config, key, merged(current, value))
    else:
        setattr(config, key, value)
