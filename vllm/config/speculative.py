# SPDX-License-Identifier: Apache-2.0
"""Speculation and, through the same door, hidden-state extraction."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.config.draft_methods import check_asked, resolve_method, settings_of
from vllm.config.draft_methods.base import DraftSettings, refuse
from vllm.config.draft_methods.stated_keys import without_stated
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.utils.options import check_keys, json_config, option

EXTRACT = "extract_hidden_states"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
#: key of `SamplingParams.extra_args`: output tokens that `replay` proposes
DRAFTS_KEY = "draft_token_ids"
#: fields filled in by the engine, never by the user
FILLED_BY_ENGINE = (
    "target_model_config",
    "target_parallel_config",
    "draft_parallel_config",
    "draft_settings",
)
#: keys that are no settings of a method
_NOT_SETTINGS = ("method", "drafter", *FILLED_BY_ENGINE)


@json_config
class SpeculativeConfig:
    """`method` and its settings: a drafter of `vllm.config.draft_methods`, or
    `extract_hidden_states`, which may have a drafter beside it.

    The keys of all methods are fields here; those that a method has no use for are refused.
    `draft_settings` becomes the drafter's own, typed and checked.

    For extraction `draft_model_config` is given as `{"hf_config":
    {"eagle_aux_hidden_state_layer_ids": [...]}}` and becomes a `ModelConfig`: the target's with an
    `ExtractHiddenStatesConfig` as `hf_config`.
    """

    method: str | None = option(
        default=None,
        help="`eagle3`, `dflash`, `mtp`, `draft_model`, `ngram`, `replay` or "
        "`extract_hidden_states`; if absent, what the checkpoint at `model` is.",
    )
    num_speculative_tokens: int | None = option(
        default=None, help="Draft tokens per step; 1 for extraction."
    )
    full_width: bool = option(
        default=False,
        help="Verify num_speculative_tokens in every step, whether that pays or not: to measure "
        "acceptance.",
    )
    prompt_lookup_max: int | None = option(
        default=None, help="Most tokens that `ngram` looks up; 5 if neither is given."
    )
    prompt_lookup_min: int | None = option(
        default=None, help="Fewest tokens that `ngram` looks up; prompt_lookup_max if not given."
    )
    acceptance: float | None = option(
        default=None, help="Share of the draft tokens that `replay` leaves as they are (1)."
    )
    seed: int | None = option(default=None, help="Of the draft tokens that `replay` replaces (0).")
    drafter: dict[str, Any] | None = option(
        default=None,
        help='A drafter beside extraction: `{"method": "ngram", "num_speculative_tokens": 3}`.',
    )
    model: str | None = option(
        default=None, help="Directory or hub name of the draft checkpoint, or the word `ngram`."
    )
    revision: str | None = option(
        default=None, help="Branch, tag or commit of the draft checkpoint."
    )
    draft_model_config: Any = option(
        default=None, help='`{"hf_config": {"eagle_aux_hidden_state_layer_ids": [...]}}`.'
    )
    draft_tensor_parallel_size: int | None = option(
        default=None, help="Devices of the drafter: 1 or --tensor-parallel-size."
    )
    draft_sample_method: str | None = option(
        default=None, help="How a draft model chooses tokens: `greedy` or `probabilistic`."
    )
    target_model_config: Any = option(default=None, flag=False, help="The served model.")
    target_parallel_config: Any = option(default=None, flag=False, help="Its parallel sizes.")
    draft_parallel_config: Any = option(default=None, flag=False, help="The drafter's.")
    draft_settings: Any = option(default=None, flag=False, help="Of the drafter, if there is one.")

    def __post_init__(self) -> None:
        self.method = resolve_method(self.method, self.model, self.revision, others=(EXTRACT,))
        if self.method == EXTRACT:
            self._check_extraction()
            self.draft_settings = self._settings_beside_extraction()
            if self.target_model_config is not None:
                self._build_draft(self.target_model_config)
            return
        if self.drafter is not None:
            refuse("drafter", f"goes with method {EXTRACT}", self.drafter)
        settings = settings_of(self.method, self.as_given(_NOT_SETTINGS))
        if self.target_model_config is not None:
            settings = settings.resolved(self.target_model_config, self.target_parallel_config)
        self.draft_settings = settings
        self.num_speculative_tokens = settings.num_speculative_tokens

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        target: ModelConfig | None,
        parallel: ParallelConfig | None,
        what: str,
    ) -> SpeculativeConfig:
        """From the keys that a user wrote into `what`, also those that choose nothing here."""
        check_asked(given)
        own = without_stated(given, target)
        check_keys(cls, own, what, hidden=FILLED_BY_ENGINE)
        return cls(**own, target_model_config=target, target_parallel_config=parallel)

    def as_given(self, hidden: tuple[str, ...] = FILLED_BY_ENGINE) -> dict[str, Any]:
        """What says all of it again: the keys that have a value, without the `hidden` ones."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: value
            for name, value in values.items()
            if name not in hidden and value is not None and value is not False
        }

    def _settings_beside_extraction(self) -> DraftSettings | None:
        if self.drafter is None:
            return None
        if self.drafter.get("method") == EXTRACT:
            refuse("drafter", f"must have another method than {EXTRACT}", self.drafter)
        beside = SpeculativeConfig.of(
            self.drafter,
            self.target_model_config,
            self.target_parallel_config,
            "speculative_config.drafter",
        )
        settings: DraftSettings = beside.draft_settings
        return settings

    def _check_extraction(self) -> None:
        if self.num_speculative_tokens != 1:
            refuse(
                "num_speculative_tokens",
                f"must be 1 with method {EXTRACT}, got {self.num_speculative_tokens}",
                self.num_speculative_tokens,
            )
        if self.model is not None:
            refuse(
                "model",
                f"must be absent with method {EXTRACT}: there is no draft model",
                self.model,
            )
        if self.draft_tensor_parallel_size not in (None, 1):
            refuse(
                "draft_tensor_parallel_size",
                f"must be 1, got {self.draft_tensor_parallel_size}",
                self.draft_tensor_parallel_size,
            )
        used = ("num_speculative_tokens", "draft_model_config", "draft_tensor_parallel_size")
        for key, value in self.as_given(_NOT_SETTINGS).items():
            if key not in used:
                refuse(key, f"does not go with method {EXTRACT}; write it into drafter", value)

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
            refuse("draft_model_config", f'must be {{"hf_config": {{...}}}}, got {given!r}', given)
        inner = given.get("hf_config", {})
        if not isinstance(inner, Mapping):
            refuse("draft_model_config.hf_config", f"must be an object, got {inner!r}", inner)
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
        settings: DraftSettings | None = self.draft_settings
        return settings.num_drafts if settings else self.num_speculative_tokens or 0

    def use_eagle(self) -> bool:
        """Whether a drafter reads the target's hidden states (eagle, eagle3, mtp, dflash)."""
        return self.draft_settings is not None and self.draft_settings.reads_target

    def use_dflash(self) -> bool:
        return self.method == "dflash"

    def use_ngram_gpu(self) -> bool:
        """Whether drafts are looked up on the device, as `ngram` always does."""
        return self.method == "ngram"

    def uses_draft_model(self) -> bool:
        return self.draft_settings is not None and self.draft_settings.is_draft_model

    def uses_extract_hidden_states(self) -> bool:
        return self.method == EXTRACT


def check_layer_ids(ids: Any, num_layers: int) -> None:
    """Raise `VLLMValidationError` unless `ids` is a non-empty list of layer ids of the model."""
    key = f"draft_model_config.hf_config.{LAYER_IDS_KEY}"
    if ids is None:
        refuse(key, f"must be set with method {EXTRACT}: the list of layers to capture", None)
    is_list = isinstance(ids, list | tuple) and len(ids) > 0
    if not is_list or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        refuse(key, f"must be a non-empty list of integers, got {ids!r}", ids)
    bad = [i for i in ids if not 0 <= i <= num_layers]
    if bad:
        refuse(
            key,
            f"has ids out of range: {bad}; this model has {num_layers} layers, so ids are 0 "
            f"(embeddings) to {num_layers} (output of the last layer)",
            ids,
        )
