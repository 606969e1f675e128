# SPDX-License-Identifier: Apache-2.0
"""Settings of `eagle3`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from vllm import decisions
from vllm.config.draft_methods.base import DraftSettings, refuse
from vllm.config.draft_methods.draft_checkpoint import check_ranks, draft_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.transformers_utils.configs.eagle3 import Eagle3Config
    from vllm.transformers_utils.speculators import SpeculatorsCheckpoint

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
#: the dataset of the training, where the trainer says it: `{"layers": ids of its columns}`
_TRAINED_ON = "trained_on"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_MODELS = ("llama", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(DraftSettings):
    """An EAGLE-3 head in the speculators format; `model` is its checkpoint."""

    method: ClassVar[str] = "eagle3"
    reads_target: ClassVar[bool] = True
    knows_num_tokens: ClassVar[bool] = True

    model: str | None = None
    draft_tensor_parallel_size: int | None = None
    #: the head's `ModelConfig`, once resolved
    draft: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            refuse("model", "must be given with method eagle3: the draft checkpoint", None)

    @property
    def lookahead_tokens(self) -> int:
        return max(self.num_speculative_tokens - 1, 0)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The residual streams of the target that the head reads, ascending."""
        return () if self.draft is None else tuple(self.draft.hf_config.aux_layer_ids)

    def resolved(self, target: ModelConfig, parallel: ParallelConfig | None) -> Self:
        from vllm.transformers_utils.config import read_config_dict
        from vllm.transformers_utils.speculators import parse_speculators

        assert self.model is not None
        check_ranks(self.draft_tensor_parallel_size, parallel)
        found = parse_speculators(self.model, read_config_dict(self.model))
        if found is None or found.method != self.method:
            refuse(
                "model",
                "must be a speculators checkpoint of type eagle3 with method eagle3 (config.json "
                f"with speculators_model_type; `speculators convert` makes one), got {self.model}",
                self.model,
            )
        num_tokens = self.num_speculative_tokens or found.num_speculative_tokens
        settings = replace(self, num_speculative_tokens=num_tokens)
        draft = draft_config(target, self.model, self._head_config(found, target))
        object.__setattr__(settings, "draft", draft)
        return settings

    def _head_config(self, found: SpeculatorsCheckpoint, target: ModelConfig) -> Eagle3Config:
        from vllm.transformers_utils.configs.eagle3 import Eagle3Config

        raw, layers = found.config, found.layers
        kind = layers.get("model_type")
        if kind not in _LAYER_MODELS:
            self._refuse(f"has draft layers of type {kind}; supported: {', '.join(_LAYER_MODELS)}")
        if not isinstance(layers.get("head_dim"), int):
            self._refuse("states no head_dim, and its hidden size does not say what it is")
        if layers.get("vocab_size") != target.get_vocab_size():
            self._refuse(
                f"drafts for a vocabulary of {layers.get('vocab_size')}; the target has "
                f"{target.get_vocab_size()}"
            )
        width = raw.get("target_hidden_size") or target.get_hidden_size()
        if width != target.get_hidden_size():
            self._refuse(
                f"reads hidden states of {width}; the target's have {target.get_hidden_size()}"
            )
        flags = {name: bool(raw.get(name, False)) for name in _FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            self._refuse("sets both norm_before_fc and fc_norm")
        absent = [name for name in _FLAGS if name not in raw]
        if absent:
            why = "the draft's config does not say, and this is the format's default"
            decisions.record(", ".join(absent), False, why)
        ids = self._layer_ids(raw.get(_LAYER_IDS), target.get_num_layers())
        self._check_training(raw.get(_TRAINED_ON), ids, target.get_num_layers())
        return Eagle3Config(
            self._layer_config(layers),
            draft_vocab_size=raw.get("draft_vocab_size", 32000),
            target_hidden_size=width,
            aux_layer_ids=ids,
            **flags,
        )

    def _layer_config(self, given: dict[str, Any]) -> PretrainedConfig:
        """With `layer_types` and `sliding_window`, which not every class of configs has."""
        from transformers import AutoConfig

        kinds = given.get("layer_types") or ["full_attention"] * given["num_hidden_layers"]
        window = given.get("sliding_window")
        if "sliding_attention" in kinds and not isinstance(window, int):
            self._refuse("has layers of type sliding_attention but states no sliding_window")
        config: PretrainedConfig = type(AutoConfig.for_model(given["model_type"]))(**given)
        config.layer_types = kinds
        config.sliding_window = window
        return config

    def _layer_ids(self, given: Any, num_layers: int) -> tuple[int, ...]:
        ids = given
        if ids is None:
            ids = [2, num_layers // 2, num_layers - 3]
            decisions.record(_LAYER_IDS, ids, "the draft's config does not say; the usual layers")
        outside = [i for i in ids if not isinstance(i, int) or not 0 <= i <= num_layers]
        if outside or len(set(ids)) != len(ids) or not ids:
            self._refuse(
                f"reads hidden states {ids}: {_LAYER_IDS} must be distinct numbers from 0 "
                f"(embeddings) to {num_layers}, the target's layers"
            )
        return tuple(sorted(ids))

    def _check_training(self, data: Any, ids: tuple[int, ...], num_layers: int) -> None:
        """The last column of a dataset is the target's output, the others are what is read."""
        if data is None:
            return
        layers = data.get("layers") if isinstance(data, dict) else None
        if not isinstance(layers, list) or not all(isinstance(i, int) for i in layers):
            self._refuse(f"says {_TRAINED_ON} {data}: it must have the dataset's layer ids, layers")
        if layers != [*ids, num_layers]:
            self._refuse(
                f"was trained on hidden states {layers} (the last one the target's output), but "
                f"would get {[*ids, num_layers]} here; train it on a dataset extracted with these "
                "layers, or serve the target that the dataset was extracted from"
            )

    def _refuse(self, what: str) -> None:
        refuse("model", f": the draft checkpoint {self.model} {what}", self.model)
