# SPDX-License-Identifier: Apache-2.0
"""What the settings of every drafter have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from typing_extensions import Self

from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import VLLMValidationError

#: what one step verifies per request
MOST_DRAFTS = 15


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """One method's settings: the keys of `speculative_config` that go with it are its fields.

    A subclass checks its own fields in `__post_init__` (after `super().__post_init__()`) by
    `refuse`, and what needs the served model in `resolved`. Instances are pickled with the engine's
    configuration, so they hold plain data.
    """

    #: key of `DRAFT_METHODS`
    method: ClassVar[str]
    #: whether the drafter reads the target's hidden states (eagle3, mtp, dflash)
    reads_target: ClassVar[bool] = False
    #: tokens after its own that a row of the drafter's layers depends on
    num_ahead: ClassVar[int] = 0
    #: whether the drafter is a model of its own (draft_model)
    is_draft_model: ClassVar[bool] = False
    #: whether requests bring their drafts (`SamplingParams.extra_args`)
    brought_by_requests: ClassVar[bool] = False
    #: whether `resolved` can find out `num_speculative_tokens` where the user gave none
    knows_num_tokens: ClassVar[bool] = False

    #: drafts of one request in one step, at most; None, where that is known, until `resolved`
    num_speculative_tokens: int | None = None
    #: whether each step verifies as many, whether that pays or not
    full_width: bool = False

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count is None:
            if not self.knows_num_tokens:
                refuse("num_speculative_tokens", f"must be given with method {self.method}", None)
        elif not 1 <= count <= MOST_DRAFTS:
            refuse("num_speculative_tokens", f"must be 1 to {MOST_DRAFTS}, got {count}", count)

    def resolved(self, target: ModelConfig, parallel: ParallelConfig | None) -> Self:
        """These settings, complete and checked, for the served model."""
        return self

    @property
    def num_drafts(self) -> int:
        """`num_speculative_tokens`, once it is known."""
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    @property
    def model_config(self) -> ModelConfig | None:
        """Of a draft model, once resolved."""
        return None

    @property
    def checkpoint(self) -> str | None:
        """Where the drafter's tensors are; None: in the target's checkpoint, or it has none."""
        return None

    @property
    def checkpoint_revision(self) -> str | None:
        """Branch, tag or commit of `checkpoint`."""
        return None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The residual streams of the target that the drafter reads, ascending."""
        return ()

    @property
    def lookahead_tokens(self) -> int:
        """Slots that the drafter's own layers write past those of the tokens a step verifies."""
        return 0


def refuse(key: str, rule: str, value: Any) -> NoReturn:
    """Raise the `VLLMValidationError` of a key of `speculative_config`."""
    separator = "" if rule.startswith(":") else " "
    raise VLLMValidationError(
        f"speculative_config.{key}{separator}{rule}",
        parameter=f"speculative_config.{key}",
        value=value,
    )
