# SPDX-License-Identifier: Apache-2.0
"""What settings of heads in the speculators format have in common (eagle3, dflash)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from typing_extensions import Self

from vllm.config.draft_methods.base import refuse
from vllm.config.draft_methods.draft_checkpoint import (
    DraftCheckpointSettings,
    check_ranks,
    draft_config,
    is_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.transformers_utils.speculators import SpeculatorsCheckpoint

#: the dataset of the training, where the trainer says it: `{"layers": ids of its columns}`
_TRAINED_ON = "trained_on"


@dataclass(frozen=True, kw_only=True)
class SpeculatorsHeadSettings(DraftCheckpointSettings):
    """A head with a checkpoint of its own, `model`, that reads residual streams of the target."""

    reads_target: ClassVar[bool] = True
    knows_num_tokens: ClassVar[bool] = True
    #: types of draft layers that the head's model has
    layer_models: ClassVar[tuple[str, ...]]

    #: the head's `ModelConfig`, once resolved
    draft: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            refuse("model", f"must be given with method {self.method}: the draft checkpoint", None)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The residual streams of the target that the head reads, ascending."""
        return () if self.draft is None else tuple(self.draft.hf_config.aux_layer_ids)

    def resolved(self, target: ModelConfig, parallel: ParallelConfig | None) -> Self:
        from vllm.transformers_utils.config import read_config_dict
        from vllm.transformers_utils.speculators import parse_speculators

        assert self.model is not None
        check_ranks(self.draft_tensor_parallel_size, parallel)
        found = parse_speculators(self.model, read_config_dict(self.model, revision=self.revision))
        if found is None or found.method != self.method:
            refuse(
                "model",
                f"must be a speculators checkpoint of type {self.method} with method {self.method} "
                "(config.json with speculators_model_type; `speculators convert` makes one), got "
                f"{self.model}",
                self.model,
            )
        head = self._head_config(found, target)
        settings = replace(self, num_speculative_tokens=self._num_tokens(found, head))
        draft = draft_config(target, self.model, self.revision, head)
        object.__setattr__(settings, "draft", draft)
        return settings

    @abstractmethod
    def _head_config(self, found: SpeculatorsCheckpoint, target: ModelConfig) -> PretrainedConfig:
        """The head's config, whose text config is the layers'."""

    def _num_tokens(self, found: SpeculatorsCheckpoint, head: Any) -> int:
        """Drafts per step: as asked for, else as the checkpoint says."""
        return self.num_speculative_tokens or found.num_speculative_tokens

    # ---- what subclasses read of the checkpoint's config -------------------------------------

    def _layer_config(
        self, given: dict[str, Any], target: ModelConfig, default_kind: str | None = None
    ) -> PretrainedConfig:
        """The draft layers' config. What the file leaves out is as the class of configs has it;
        `layer_types` and `sliding_window`, which not every class knows, are always there."""
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        kind = given.get("model_type", default_kind)
        if kind not in self.layer_models:
            supported = ", ".join(self.layer_models)
            self._refuse(f"has draft layers of type {kind}; supported: {supported}")
        config: PretrainedConfig
        try:
            config = type(AutoConfig.for_model(kind))(**given)
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())
            self._refuse(f"has a transformer_layer_config that cannot be used: {reason}")
        if config.vocab_size != target.get_vocab_size():
            self._refuse(
                f"drafts for a vocabulary of {config.vocab_size}; the target has "
                f"{target.get_vocab_size()}"
            )
        kinds = given.get("layer_types") or ["full_attention"] * config.num_hidden_layers
        window = given.get("sliding_window")
        if "sliding_attention" in kinds and not (is_number(window) and window > 0):
            self._refuse(
                f"has layers of type sliding_attention but states no sliding_window: {window}"
            )
        config.layer_types = kinds
        config.sliding_window = window
        return config

    def _target_width(self, found: SpeculatorsCheckpoint, target: ModelConfig) -> int:
        width = found.config.get("target_hidden_size") or target.get_hidden_size()
        if width != target.get_hidden_size():
            self._refuse(
                f"reads hidden states of {width}; the target's have {target.get_hidden_size()}"
            )
        return int(width)

    def _draft_vocab_size(self, found: SpeculatorsCheckpoint, target: ModelConfig) -> int:
        size, most = found.config.get("draft_vocab_size", 32000), target.get_vocab_size()
        if not is_number(size) or not 1 <= size <= most:
            self._refuse(
                f"has draft_vocab_size {size!r}, which must be 1 to {most}, the target's tokens"
            )
        return size

    def _checked_layer_ids(self, key: str, ids: Any, num_layers: int) -> tuple[int, ...]:
        """Ascending."""
        numbers = ids if isinstance(ids, list) else []
        outside = [i for i in numbers if not is_number(i) or not 0 <= i <= num_layers]
        if outside or len(set(numbers)) != len(numbers) or not numbers:
            self._refuse(
                f"reads hidden states {ids}: {key} must be distinct numbers from 0 (embeddings) to "
                f"{num_layers}, the target's layers"
            )
        return tuple(sorted(ids))

    def _check_training(
        self, raw: Mapping[str, Any], ids: tuple[int, ...], num_layers: int
    ) -> None:
        """The last column of a dataset is the target's output, the others are what is read."""
        data = raw.get(_TRAINED_ON)
        if data is None:
            return
        layers = data.get("layers") if isinstance(data, dict) else None
        if not isinstance(layers, list) or not all(is_number(i) for i in layers):
            self._refuse(f"says {_TRAINED_ON} {data}: it must have the dataset's layer ids, layers")
        if layers != [*ids, num_layers]:
            self._refuse(
                f"was trained on hidden states {layers} (the last one the target's output), but "
                f"would get {[*ids, num_layers]} here; train it on a dataset extracted with these "
                "layers, or serve the target that the dataset was extracted from"
            )

    def _refuse(self, what: str) -> NoReturn:
        refuse("model", f": the draft checkpoint {self.model} {what}", self.model)
