# SPDX-License-Identifier: Apache-2.0
"""Settings of `dflash`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm import decisions
from vllm.config.draft_methods.base import MOST_DRAFTS, refuse
from vllm.config.draft_methods.draft_checkpoint import is_number
from vllm.config.draft_methods.speculators_head import SpeculatorsHeadSettings

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.transformers_utils.configs.dflash import DFlashConfig
    from vllm.transformers_utils.speculators import SpeculatorsCheckpoint

_LAYER_IDS = "aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class DFlashSettings(SpeculatorsHeadSettings):
    """A block-diffusion drafter in the speculators format, of type dflash or dspark; `model` is its
    checkpoint."""

    method: ClassVar[str] = "dflash"
    layer_models: ClassVar[tuple[str, ...]] = ("qwen3",)

    @property
    def lookahead_tokens(self) -> int:
        """The whole block is drafted, however many of its tokens are verified."""
        return 0 if self.draft is None else int(self.draft.hf_config.block_size)

    def _num_tokens(self, found: SpeculatorsCheckpoint, head: DFlashConfig) -> int:
        asked = self.num_speculative_tokens
        if asked is not None and asked > head.num_drafts:
            refuse(
                "num_speculative_tokens",
                f"must be at most {head.num_drafts}, the drafts in a block of {self.model}, got "
                f"{asked}",
                asked,
            )
        tokens = asked or found.num_speculative_tokens
        if tokens > MOST_DRAFTS:
            why = f"a step verifies at most {MOST_DRAFTS}"
            decisions.record("num_speculative_tokens", MOST_DRAFTS, why, tokens)
        return min(tokens, MOST_DRAFTS)

    def _head_config(self, found: SpeculatorsCheckpoint, target: ModelConfig) -> DFlashConfig:
        from vllm.transformers_utils.configs.dflash import DFlashConfig

        raw = found.config
        layers = self._layer_config(found.layers, target, default_kind="qwen3")
        rope = layers.rope_parameters or {}
        if "sliding_attention" in rope:
            # All layers are trained with this one.
            layers.rope_parameters = rope["sliding_attention"]
        width = self._target_width(found, target)
        if layers.hidden_size != width:
            self._refuse(
                f"has layers of {layers.hidden_size} on hidden states of {width}; the embedding, "
                "which is the target's, needs equal ones"
            )
        for key in (_LAYER_IDS, "mask_token_id"):
            if raw.get(key) is None:
                self._refuse(f"lacks {key} in its config")
        mask_id = raw["mask_token_id"]
        if not is_number(mask_id) or not 0 <= mask_id < layers.vocab_size:
            self._refuse(f"has mask_token_id {mask_id!r}, no token of the target")
        num_layers = target.get_num_layers()
        ids = self._checked_layer_ids(_LAYER_IDS, raw[_LAYER_IDS], num_layers)
        self._check_training(raw, ids, num_layers)
        return DFlashConfig(
            layers,
            draft_vocab_size=self._draft_vocab_size(found, target),
            target_hidden_size=width,
            aux_layer_ids=ids,
            mask_token_id=mask_id,
            block_size=self._block_size(raw.get("block_size", 8)),
            sample_from_anchor=bool(raw.get("sample_from_anchor", found.kind == "dspark")),
            sliding_window_non_causal=bool(raw.get("sliding_window_non_causal", False)),
            markov_rank=self._markov_rank(raw) if found.kind == "dspark" else 0,
        )

    def _markov_rank(self, raw: Mapping[str, Any]) -> int:
        rank, kind = raw.get("markov_rank", 256), raw.get("markov_head_type", "vanilla")
        if not is_number(rank) or rank < 0:
            self._refuse(f"has markov_rank {rank!r}, which must be a number from 0 on")
        if rank and kind != "vanilla":
            self._refuse(
                f"has a markov_head_type {kind}, which is not supported; supported: vanilla"
            )
        if raw.get("enable_confidence_head", True):
            why = "how many drafts are verified is chosen for all requests of a step alike"
            decisions.record("the draft's confidence head", "not used", why)
        return rank

    def _block_size(self, size: Any) -> int:
        if not is_number(size) or size < 2:
            self._refuse(f"has block_size {size!r}; blocks have two tokens or more")
        return size
