# SPDX-License-Identifier: Apache-2.0
"""Methods of drafting that are known elsewhere and not served here: what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config.draft_methods.base import refuse

_HEADS = "eagle3, dflash or the target's own mtp head"
_ONE_PASS = "dflash, which drafts all tokens in one pass, too, or eagle3"

#: method -> what to use instead
NOT_SERVED: Mapping[str, str] = {
    "custom_class": "one of these, or add one (docs/speculative_decoding.md)",
    "dflash2": "a checkpoint of type dflash or dspark",
    "eagle": "eagle3, whose heads `speculators` trains for the same targets",
    "eagle2": "eagle3, whose heads `speculators` trains for the same targets",
    "lookahead": "ngram",
    "medusa": _HEADS,
    "mlp_speculator": _HEADS,
    "pard": _ONE_PASS,
    "peagle": _ONE_PASS,
    "suffix": "ngram, which looks up what each request had before",
    "xpress": "a checkpoint of type dflash or dspark",
}

#: keys of `speculative_config` that turn such a method on -> the method
_KEYS: Mapping[str, str] = {
    "parallel_drafting": "peagle",
    "suffix_decoding_max_cached_requests": "suffix",
    "suffix_decoding_max_spec_factor": "suffix",
    "suffix_decoding_max_tree_depth": "suffix",
    "suffix_decoding_min_token_prob": "suffix",
}


def check_served(given: Mapping[str, Any], supported: tuple[str, ...]) -> None:
    """`VLLMValidationError` if the keys of a `speculative_config`, checked or not, ask for a method
    that is not served; it names what to use instead."""
    method: Any = given.get("method")
    if method in NOT_SERVED:
        refuse(
            "method",
            f": {method} is not supported; use {NOT_SERVED[method]}; supported: "
            + ", ".join(supported),
            method,
        )
    for key, value in given.items():
        asked = _KEYS.get(key)
        if asked is not None and value not in (None, False):
            refuse(key, f": {asked} is not supported; use {NOT_SERVED[asked]}", value)


def method_of_config(raw: Mapping[str, Any]) -> str | None:
    """The method that a draft checkpoint's config.json, of no library's format, was made for; None
    for a model."""
    kind = raw.get("model_type")
    if kind in NOT_SERVED:
        return str(kind)
    if "dflash_config" in raw:
        return "dflash"
    architectures = [str(name) for name in raw.get("architectures") or ()]
    if kind == "eagle3" or any("Eagle3" in name for name in architectures):
        return "eagle3"
    if any(name.startswith("Eagle") for name in architectures):
        return "eagle"
    return None
