# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint given as the model: `vllm serve SPECULATORS_CHECKPOINT`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from vllm import decisions
from vllm.config.speculative import FILLED_BY_ENGINE, SpeculativeConfig
from vllm.exceptions import VLLMValidationError


class ModelArgs(Protocol):
    """The arguments that say which model is served, and which drafts: see `EngineArgs`."""

    model: Any
    revision: Any
    tokenizer: Any
    served_model_name: Any
    speculative_config: Any
    spec_tokens: Any


def target_of_draft(args: ModelArgs) -> dict[str, Any]:
    """The arguments that change if `args.model` is a speculators checkpoint that can draft: its
    verifier (a name or a local directory) is served, and it drafts. Nothing for other models.

    What `speculative_config` says is stronger than the checkpoint. `VLLMValidationError` for a
    checkpoint that names no verifier.
    """
    from vllm.transformers_utils.config import read_config_dict
    from vllm.transformers_utils.speculators import METHODS, parse_speculators

    draft = str(args.model)
    raw = read_config_dict(draft, revision=args.revision)
    if raw.get("speculators_model_type") not in METHODS:
        return {}
    found = parse_speculators(draft, raw)
    assert found is not None
    if found.verifier is None:
        raise VLLMValidationError(
            f"{draft!r} is a draft checkpoint ({found.method}) that names no verifier; serve the "
            f'target with --speculative-config \'{{"model": "{draft}"}}\'',
            parameter="model",
            value=draft,
        )
    decisions.record(
        "model", found.verifier, f"{draft} is a draft checkpoint ({found.method}) of it", draft
    )
    settings = {"num_speculative_tokens": found.num_speculative_tokens}
    settings |= _given(args.speculative_config)
    if args.spec_tokens is not None:
        del settings["num_speculative_tokens"]
    return {
        "model": found.verifier,
        "revision": None,
        "tokenizer": args.tokenizer or found.verifier,
        "served_model_name": args.served_model_name or [draft, found.verifier],
        "speculative_config": settings | {"method": found.method, "model": draft},
        "spec_method": None,
        "spec_model": None,
    }


def _given(config: Any) -> dict[str, Any]:
    if isinstance(config, SpeculativeConfig):
        names = [f.name for f in dataclasses.fields(config) if f.name not in FILLED_BY_ENGINE]
        values = {name: getattr(config, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}
    return dict(config) if isinstance(config, Mapping) else {}
