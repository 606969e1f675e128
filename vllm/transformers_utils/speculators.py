# SPDX-License-Identifier: Apache-2.0
"""Recognition of speculators-format draft checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True)
class SpeculatorsCheckpoint:
    """What such a `config.json` says: the kind of drafter, its target and its draft length."""

    kind: str
    verifier: str | None
    num_speculative_tokens: int | None


def parse_speculators(raw: Mapping[str, Any]) -> SpeculatorsCheckpoint | None:
    """The description in a `config.json` dict, or None for an ordinary checkpoint."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return None
    config = raw.get("speculators_config") or {}
    verifier = (config.get("verifier") or {}).get("name_or_path")
    methods = config.get("proposal_methods") or [{}]
    return SpeculatorsCheckpoint(str(kind), verifier, methods[0].get("speculative_tokens"))


def refuse_speculators(model: str, raw: Mapping[str, Any]) -> None:
    """Raise `VLLMValidationError` when `raw` is the config of a draft model."""
    found = parse_speculators(raw)
    if found is None:
        return
    instead = (
        f"serve the verifier instead: {found.verifier}"
        if found.verifier
        else ("serve its verifier instead (the config names none)")
    )
    raise VLLMValidationError(
        f"{model!r} is a speculators draft checkpoint ({found.kind}); drafting with {found.kind} "
        f"is not supported yet; {instead}",
        parameter="model",
        value=model,
    )
