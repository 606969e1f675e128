# SPDX-License-Identifier: Apache-2.0
"""Settings of `eagle3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm import decisions
from vllm.config.draft_methods.speculators_head import SpeculatorsHeadSettings

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.transformers_utils.configs.eagle3 import Eagle3Config
    from vllm.transformers_utils.speculators import SpeculatorsCheckpoint

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(SpeculatorsHeadSettings):
    """An EAGLE-3 head in the speculators format; `model` is its checkpoint."""

    method: ClassVar[str] = "eagle3"
    num_ahead: ClassVar[int] = 1
    layer_models: ClassVar[tuple[str, ...]] = ("llama", "qwen3")

    @property
    def lookahead_tokens(self) -> int:
        return self.num_drafts - 1

    def _head_config(self, found: SpeculatorsCheckpoint, target: ModelConfig) -> Eagle3Config:
        from vllm.transformers_utils.configs.eagle3 import Eagle3Config

        raw = found.config
        layers = self._layer_config(found.layers, target)
        if not isinstance(found.layers.get("head_dim"), int):
            self._refuse("states no head_dim, and its hidden size does not say what it is")
        width = self._target_width(found, target)
        flags = {name: bool(raw.get(name, False)) for name in _FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            self._refuse("sets both norm_before_fc and fc_norm")
        absent = [name for name in _FLAGS if name not in raw]
        if absent:
            why = "the draft's config does not say, and this is the format's default"
            decisions.record(", ".join(absent), False, why)
        ids = self._layer_ids(raw.get(_LAYER_IDS), target.get_num_layers())
        self._check_training(raw, ids, target.get_num_layers())
        return Eagle3Config(
            layers,
            draft_vocab_size=self._draft_vocab_size(found, target),
            target_hidden_size=width,
            aux_layer_ids=ids,
            **flags,
        )

    def _layer_ids(self, given: Any, num_layers: int) -> tuple[int, ...]:
        ids = given
        if ids is None:
            ids = [2, num_layers // 2, num_layers - 3]
            decisions.record(_LAYER_IDS, ids, "the draft's config does not say; the usual layers")
        return self._checked_layer_ids(_LAYER_IDS, ids, num_layers)
