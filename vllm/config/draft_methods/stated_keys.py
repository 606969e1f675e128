# SPDX-License-Identifier: Apache-2.0
"""Keys of `speculative_config` that choose nothing here: what they may say holds anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config.draft_methods.base import refuse
from vllm.config.model import ModelConfig


@dataclass(frozen=True)
class StatedKey:
    """`rule`: what the value must be, and why or what to use instead. `allowed`: values beside
    null; `holds`: where that depends on the target, which `rule` may name."""

    rule: str
    allowed: tuple[Any, ...] = ()
    holds: Callable[[Any, ModelConfig], bool] | None = None

    def check(self, key: str, value: Any, target: ModelConfig | None) -> None:
        """`VLLMValidationError` for a value that does not hold."""
        if value is None or value in self.allowed:
            return
        if self.holds is None or target is None or not self.holds(value, target):
            refuse(key, f"{self.rule.format(target=target)}; got {value!r}", value)


def _long_enough(value: Any, target: ModelConfig) -> bool:
    return isinstance(value, int) and value >= target.max_model_len


_ABSENT = "must be absent: "
#: what other releases have
STATED_KEYS: Mapping[str, StatedKey] = {
    "attention_backend": StatedKey(_ABSENT + "the drafter has the target's --attention-backend"),
    "code_revision": StatedKey(_ABSENT + "a draft checkpoint's code is that of its revision"),
    "disable_by_batch_size": StatedKey(
        _ABSENT + "each step verifies as many drafts as pay for its requests, none if none do"
    ),
    "disable_padded_drafter_batch": StatedKey(
        "must be false: drafters always run on padded batches", (False,)
    ),
    "draft_load_config": StatedKey(_ABSENT + "the drafter is loaded as --load-format says"),
    "enforce_eager": StatedKey(
        "must be the target's, {target.enforce_eager}: --enforce-eager is for the drafter, too",
        holds=lambda value, target: value == target.enforce_eager,
    ),
    "max_model_len": StatedKey(
        "must be a number from {target.max_model_len} on, the target's, whose sequences are all "
        "drafted for; a smaller --max-model-len is for both",
        holds=_long_enough,
    ),
    "parallel_drafting": StatedKey("must be false; use dflash", (False,)),
    "quantization": StatedKey(
        _ABSENT + "a drafter's weights have the target's dtype (mtp: are as the target's); give a "
        "checkpoint that is not quantised"
    ),
    "rejection_sample_method": StatedKey(
        "must be strict: a draft is accepted if it is the token that the target samples",
        ("strict", "standard"),
    ),
    "speculative_token_tree": StatedKey(_ABSENT + "drafts are one chain of num_speculative_tokens"),
    "suffix_decoding_max_cached_requests": StatedKey(_ABSENT + "use ngram"),
    "suffix_decoding_max_spec_factor": StatedKey(_ABSENT + "use ngram"),
    "suffix_decoding_max_tree_depth": StatedKey(_ABSENT + "use ngram"),
    "suffix_decoding_min_token_prob": StatedKey(_ABSENT + "use ngram"),
    "tensor_parallel_size": StatedKey("must be absent; write draft_tensor_parallel_size instead"),
}


def without_stated(given: Mapping[str, Any], target: ModelConfig | None) -> dict[str, Any]:
    """`given` without the keys that choose nothing. `VLLMValidationError` where what one of them
    says does not hold beside `target`."""
    for key in STATED_KEYS.keys() & given:
        STATED_KEYS[key].check(key, given[key], target)
    return {key: value for key, value in given.items() if key not in STATED_KEYS}
