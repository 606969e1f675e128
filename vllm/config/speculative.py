# SPDX-License-Identifier: Apache-2.0
"""Speculation and, through the same door, hidden-state extraction."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.config.model import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import config, option

EXTRACT = "extract_hidden_states"
REPLAY = "replay"
SUPPORTED_METHODS = (EXTRACT, REPLAY)
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
#: key of `SamplingParams.extra_args`: output tokens that `replay` proposes
DRAFTS_KEY = "draft_token_ids"
#: what one step verifies per request
MOST_DRAFTS = 15
#: fields filled in by the engine, never by the user
FILLED_BY_ENGINE = ("target_model_config", "target_parallel_config", "draft_parallel_config")


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """A drafter that proposes what requests bring: `num_speculative_tokens` per step, each of them
    the request's with probability `acceptance` and a random one else, drawn by `seed`."""

    num_speculative_tokens: int
    acceptance: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MOST_DRAFTS:
            _fail(
                "num_speculative_tokens",
                f"must be 1 to {MOST_DRAFTS}, got {self.num_speculative_tokens}",
                self.num_speculative_tokens,
            )
        if not 0 <= self.acceptance <= 1:
            _fail("acceptance", f"must be 0 to 1, got {self.acceptance}", self.acceptance)


@config
class SpeculativeConfig:
    """`method` and its settings: `extract_hidden_states`, or `replay`, which verifies draft tokens
    that requests bring in `extra_args["draft_token_ids"]` (tests and measurements). Extraction may
    have a drafter beside it.

    `draft_model_config` is given as `{"hf_config": {"eagle_aux_hidden_state_layer_ids": [...]}}`
    and becomes a `ModelConfig`: the target's with an `ExtractHiddenStatesConfig` as `hf_config`.
    """

    method: str | None = option(default=None, help="`extract_hidden_states` or `replay`.")
    num_speculative_tokens: int | None = option(
        default=None, help="Draft tokens per step; 1 for extraction."
    )
    acceptance: float = option(
        default=1.0, help="Share of the draft tokens that `replay` leaves as they are."
    )
    seed: int = option(default=0, help="Of the draft tokens that `replay` replaces.")
    drafter: dict[str, Any] | None = option(
        default=None,
        help='A drafter beside extraction: `{"method": "replay", "num_speculative_tokens": 3}`.',
    )
    model: str | None = option(default=None, help="Draft model; extraction has none.")
    draft_model_config: Any = option(
        default=None, help='`{"hf_config": {"eagle_aux_hidden_state_layer_ids": [...]}}`.'
    )
    draft_tensor_parallel_size: int | None = option(
        default=None, help="Devices of the drafter: 1 or --tensor-parallel-size."
    )
    disable_padded_drafter_batch: bool = option(
        default=False, help="Not allowed with extraction; only false is accepted."
    )
    target_model_config: Any = option(default=None, flag=False, help="The served model.")
    target_parallel_config: Any = option(default=None, flag=False, help="Its parallel sizes.")
    draft_parallel_config: Any = option(default=None, flag=False, help="The drafter's.")

    def __post_init__(self) -> None:
        if self.method not in SUPPORTED_METHODS:
            named = self.method or (f"drafting with model {self.model!r}" if self.model else "none")
            raise VLLMValidationError(
                f"speculative_config: method {named} is not supported yet; supported: "
                + ", ".join(SUPPORTED_METHODS),
                parameter="speculative_config.method",
                value=self.method,
            )
        self.replay  # noqa: B018 (its errors are the configuration's)
        if self.method == EXTRACT:
            self._check_extraction()
            if self.target_model_config is not None:
                self._build_draft(self.target_model_config)

    @property
    def replay(self) -> ReplayConfig | None:
        """The drafter, if there is one."""
        if self.method == REPLAY:
            if self.drafter is not None:
                _fail("drafter", f"goes with method {EXTRACT}", self.drafter)
            tokens = self.num_speculative_tokens or 0
            return ReplayConfig(tokens, self.acceptance, self.seed)
        if self.drafter is None:
            return None
        given = dict(self.drafter)
        known = {field.name for field in dataclasses.fields(ReplayConfig)}
        if given.pop("method", None) != REPLAY or set(given) - known:
            _fail("drafter", f"must have method {REPLAY} and keys of {sorted(known)}", self.drafter)
        return ReplayConfig(**given)

    def _check_extraction(self) -> None:
        if self.num_speculative_tokens != 1:
            _fail(
                "num_speculative_tokens",
                f"must be 1 with method {EXTRACT}, got {self.num_speculative_tokens}",
                self.num_speculative_tokens,
            )
        if self.model is not None:
            _fail(
                "model",
                f"must be absent with method {EXTRACT}: there is no draft model",
                self.model,
            )
        if self.disable_padded_drafter_batch:
            _fail("disable_padded_drafter_batch", f"is not allowed with method {EXTRACT}", True)
        if self.draft_tensor_parallel_size not in (None, 1):
            _fail(
                "draft_tensor_parallel_size",
                f"must be 1, got {self.draft_tensor_parallel_size}",
                self.draft_tensor_parallel_size,
            )

    def _build_draft(self, target: ModelConfig) -> None:
        from vllm.transformers_utils.configs.extract_hidden_states import ExtractHiddenStatesConfig

        given = self._given_hf_config()
        check_layer_ids(given.get(LAYER_IDS_KEY), target.get_num_layers())
        draft = copy.copy(target)
        draft.hf_config = ExtractHiddenStatesConfig(target.hf_config, **given)
        draft.model_arch_config = dataclasses.replace(
            target.model_arch_config,
            architectures=tuple(draft.hf_config.architectures),
            model_type=draft.hf_config.model_type,
        )
        self.draft_model_config = draft
        self.draft_parallel_config = self.target_parallel_config

    def _given_hf_config(self) -> dict[str, Any]:
        """The user's part of the draft config, whichever of the two forms it came in."""
        given = self.draft_model_config
        if given is None:
            return {}
        if isinstance(given, ModelConfig):
            ids = getattr(given.hf_config, LAYER_IDS_KEY, None)
            return {} if ids is None else {LAYER_IDS_KEY: ids}
        if not isinstance(given, Mapping) or set(given) - {"hf_config"}:
            _fail("draft_model_config", f'must be {{"hf_config": {{...}}}}, got {given!r}', given)
        inner = given.get("hf_config", {})
        if not isinstance(inner, Mapping):
            _fail("draft_model_config.hf_config", f"must be an object, got {inner!r}", inner)
        return dict(inner)

    @property
    def extraction_layer_ids(self) -> list[int]:
        """The captured layers in the given order; id k is the stream after k decoder layers."""
        return list(getattr(self.draft_model_config.hf_config, LAYER_IDS_KEY))

    @property
    def tokens_per_request(self) -> int:
        """Tokens of a decoding request in one step: its own and the drafts to verify."""
        return 1 + self.num_drafts

    @property
    def num_drafts(self) -> int:
        """Draft tokens that a step verifies, or of extraction counts as if it did."""
        replay = self.replay
        return replay.num_speculative_tokens if replay else self.num_speculative_tokens or 0

    def use_eagle(self) -> bool:
        """Whether a drafter reads the target's hidden states (eagle, eagle3, mtp, dflash)."""
        return False

    def use_dflash(self) -> bool:
        return False

    def use_ngram_gpu(self) -> bool:
        return False

    def uses_draft_model(self) -> bool:
        return False

    def uses_extract_hidden_states(self) -> bool:
        return self.method == EXTRACT


def check_layer_ids(ids: Any, num_layers: int) -> None:
    """Raise `VLLMValidationError` unless `ids` is a non-empty list of layer ids of the model."""
    key = f"draft_model_config.hf_config.{LAYER_IDS_KEY}"
    if ids is None:
        _fail(key, f"must be set with method {EXTRACT}: the list of layers to capture", None)
    is_list = isinstance(ids, list | tuple) and len(ids) > 0
    if not is_list or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        _fail(key, f"must be a non-empty list of integers, got {ids!r}", ids)
    bad = [i for i in ids if not 0 <= i <= num_layers]
    if bad:
        _fail(
            key,
            f"has ids out of range: {bad}; this model has {num_layers} layers, so ids are 0 "
            f"(embeddings) to {num_layers} (output of the last layer)",
            ids,
        )


def _fail(key: str, rule: str, value: Any) -> None:
    raise VLLMValidationError(
        f"speculative_config.{key} {rule}", parameter=f"speculative_config.{key}", value=value
    )
