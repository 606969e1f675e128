# SPDX-License-Identifier: Apache-2.0
"""Draft checkpoints in the format of the speculators library: `speculators_model_type` in
config.json says what they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError

#: `speculators_model_type` -> method of `speculative_config`
METHODS: Mapping[str, str] = {
    "dflash": "dflash",
    "dspark": "dflash",
    "eagle3": "eagle3",
    "mtp": "mtp",
}


@dataclass(frozen=True)
class SpeculatorsCheckpoint:
    """`verifier`: name or directory of the target, if the config names one; `config`: all of it."""

    path: str
    method: str
    num_speculative_tokens: int
    verifier: str | None
    config: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """`speculators_model_type`."""
        return str(self.config["speculators_model_type"])

    @property
    def layers(self) -> dict[str, Any]:
        """`transformer_layer_config`."""
        return dict(self.config["transformer_layer_config"])


def parse_speculators(path: str, raw: Mapping[str, Any]) -> SpeculatorsCheckpoint | None:
    """What `raw`, the config of the checkpoint at `path`, says; None if it is of another kind.

    Raises `VLLMValidationError` for a type that no method drafts with, and for missing keys.
    """
    kind = raw.get("speculators_model_type")
    if kind is None:
        return None
    if kind not in METHODS:
        raise _error(
            path,
            f"is a speculators checkpoint of type {kind}, which is not supported; supported: "
            + ", ".join(METHODS),
        )
    described = raw.get("speculators_config")
    tokens = _num_tokens(described)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        key = "speculators_config.proposal_methods[0].speculative_tokens"
        raise _error(
            path, f"is a speculators checkpoint whose config lacks {key}, a number from 1 on"
        )
    if not isinstance(raw.get("transformer_layer_config"), Mapping):
        raise _error(
            path, "is a speculators checkpoint whose config lacks transformer_layer_config"
        )
    return SpeculatorsCheckpoint(path, METHODS[kind], tokens, verifier_of(raw), raw)


def verifier_of(raw: Mapping[str, Any]) -> str | None:
    """Name or directory of the target that the config `raw` of a draft checkpoint names."""
    described = raw.get("speculators_config")
    verifier = described.get("verifier") if isinstance(described, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) else None


def _num_tokens(described: Any) -> Any:
    """`proposal_methods[0].speculative_tokens` of a `speculators_config`; None if it has none."""
    proposals = described.get("proposal_methods") if isinstance(described, Mapping) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    return first.get("speculative_tokens") if isinstance(first, Mapping) else None


def _error(path: str, what: str) -> VLLMValidationError:
    return VLLMValidationError(f"{path!r} {what}", parameter="model", value=path)
