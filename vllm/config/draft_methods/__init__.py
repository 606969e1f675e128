# SPDX-License-Identifier: Apache-2.0
"""What `speculative_config.method` may be: for each drafter its settings and its class.

A new method is a settings class, a `Drafter` (`vllm.v1.spec_decode.drafter`) and a line here. Both
are imported when the method is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm import decisions
from vllm.config.draft_methods.base import DraftSettings, refuse
from vllm.utils.class_registry import resolve_class

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


@dataclass(frozen=True)
class DraftMethod:
    """Dotted paths: `settings` of a `DraftSettings`, `drafter` of a `Drafter`."""

    settings: str
    drafter: str


DRAFT_METHODS: Mapping[str, DraftMethod] = {
    "dflash": DraftMethod(
        "vllm.config.draft_methods.dflash.DFlashSettings",
        "vllm.v1.spec_decode.dflash_drafter.DFlashDrafter",
    ),
    "draft_model": DraftMethod(
        "vllm.config.draft_methods.draft_model.DraftModelSettings",
        "vllm.v1.spec_decode.model_drafter.ModelDrafter",
    ),
    "eagle3": DraftMethod(
        "vllm.config.draft_methods.eagle3.Eagle3Settings",
        "vllm.v1.spec_decode.head_drafter.Eagle3Drafter",
    ),
    "mtp": DraftMethod(
        "vllm.config.draft_methods.mtp.MtpSettings", "vllm.v1.spec_decode.head_drafter.MtpDrafter"
    ),
    "ngram": DraftMethod(
        "vllm.config.draft_methods.ngram.NgramSettings", "vllm.v1.spec_decode.ngram.NgramDrafter"
    ),
    "replay": DraftMethod(
        "vllm.config.draft_methods.replay.ReplaySettings",
        "vllm.v1.spec_decode.replay.ReplayDrafter",
    ),
}

#: families that have a name of their own for the head in their checkpoints; whether a target's
#: head is known is decided by its config
_MTP_FAMILIES = (
    *("deepseek", "ernie", "exaone4_5", "exaone_moe", "gemma4", "glm4_moe", "glm4_moe_lite"),
    *("glm_ocr", "hy_v3", "longcat_flash", "mimo", "nemotron_h", "pangu_ultra_moe"),
    *("qwen3_5", "qwen3_next", "step3p5"),
)

#: other names of methods, with what they meant
ALIASES: Mapping[str, str] = {
    "ngram_gpu": "ngram",
    "dspark": "dflash",
    **{f"{family}_mtp": "mtp" for family in _MTP_FAMILIES},
}


def resolve_method(
    method: str | None,
    model: str | None,
    revision: str | None = None,
    others: tuple[str, ...] = (),
) -> str:
    """The method that is meant by `method`, or without one by `model` at `revision`: a key of
    `DRAFT_METHODS` or one of `others`. `VLLMValidationError` for any other, naming what there is.
    """
    if method is None and model == "ngram":
        return "ngram"
    if method is None and model is not None:
        method = _method_of(model, revision)
    if method is not None and method in ALIASES:
        decisions.record("speculative method", ALIASES[method], "another name of it", method)
        return ALIASES[method]
    supported = (*others, *DRAFT_METHODS)
    check_served({"method": method}, supported)
    if method is None or method not in supported:
        named = method or (f"drafting with model {model!r}" if model else "none")
        refuse("method", f": {named} is not supported; supported: {', '.join(supported)}", method)
    return method


def check_asked(given: Mapping[str, Any]) -> None:
    """`VLLMValidationError` if a `speculative_config`, its keys not yet checked, asks for a method
    that is known and not served: its keys would be unknown, which says less."""
    check_served(given, tuple(DRAFT_METHODS))


def _method_of(model: str, revision: str | None) -> str:
    """What the checkpoint `model` drafts with."""
    from vllm.transformers_utils.config import read_config_dict
    from vllm.transformers_utils.speculators import parse_speculators

    raw = read_config_dict(model, revision=revision)
    found = parse_speculators(model, raw)
    method = found.method if found else method_of_config(raw) or "draft_model"
    decisions.record("speculative method", method, f"the kind of checkpoint that {model} is")
    return method


def settings_of(method: str, given: Mapping[str, Any]) -> DraftSettings:
    """The settings of `method`, a key of `DRAFT_METHODS`, from the keys that the user gave.

    `VLLMValidationError` for a key that the method does not have, and for what its settings refuse.
    """
    kind = resolve_class(DRAFT_METHODS[method].settings)
    known = [field.name for field in fields(kind) if field.init]
    for key in given:
        if key not in known:
            refuse(
                key, f"does not go with method {method}, which has {', '.join(known)}", given[key]
            )
    settings: DraftSettings = kind(**given)
    return settings


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
