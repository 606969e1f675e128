# SPDX-License-Identifier: Apache-2.0
"""What a generation config says of sampling: defaults of requests, and what is not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import decisions

#: generation_config key -> SamplingParams field
_SERVED = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
#: keys that say nothing of which tokens are generated, or (`eos_token_id`) are served
_NOT_SAMPLING = frozenset(
    (
        *("_from_model_config", "bos_token_id", "cache_config", "cache_implementation"),
        *("compile_config", "decoder_start_token_id", "disable_compile", "eos_token_id"),
        *("max_cache_len", "output_attentions", "output_hidden_states", "output_logits"),
        *("output_scores", "pad_token_id", "prefill_chunk_size", "return_dict_in_generate"),
        *("transformers_version", "use_cache"),
    )
)
#: keys for which 1 is as if they were absent
_NEUTRAL_AT_ONE = frozenset(
    (
        *("encoder_repetition_penalty", "guidance_scale", "length_penalty", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "top_h", "typical_p"),
    )
)


def sampling_defaults(found: Mapping[str, Any]) -> dict[str, Any]:
    """Default sampling parameters, named as in `SamplingParams`, of a generation config."""
    return {field: found[key] for key, field in _SERVED.items() if found.get(key) is not None}


def record_ignored(found: Mapping[str, Any]) -> None:
    """Record what a generation config says of sampling and is not served."""
    ignored = {key: value for key, value in found.items() if _is_ignored(key, value)}
    if ignored:
        text = ", ".join(f"{key}: {value}" for key, value in sorted(ignored.items()))
        why = "served are eos_token_id, " + ", ".join(_SERVED)
        decisions.record("generation config", "ignored in part", why, text)


def _is_ignored(key: str, value: Any) -> bool:
    if key in _SERVED or key in _NOT_SAMPLING:
        return False
    if key == "do_sample":
        # Requests sample unless they, or `temperature` of the file, say 0.
        return value is False
    return bool(value) and not (key in _NEUTRAL_AT_ONE and value == 1)
