# SPDX-License-Identifier: Apache-2.0
"""What a generation config says of sampling: defaults of requests, and what is not served of it."""

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
#: keys that say nothing of which tokens are generated, or (`do_sample`, `eos_token_id`) are served
_NOT_SAMPLING = frozenset(
    (
        *("_from_model_config", "bos_token_id", "cache_config", "cache_implementation"),
        *("compile_config", "decoder_start_token_id", "disable_compile", "do_sample"),
        *("eos_token_id", "max_cache_len", "output_attentions", "output_hidden_states"),
        *("output_logits", "output_scores", "pad_token_id", "prefill_chunk_size"),
        *("return_dict_in_generate", "transformers_version", "use_cache"),
    )
)
#: keys for which 1 is as if they were absent
_NEUTRAL_AT_ONE = frozenset(
    (
        *("encoder_repetition_penalty", "guidance_scale", "length_penalty", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "top_h", "typical_p"),
    )
)


def sampling_defaults(found: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Default sampling parameters, named as in `SamplingParams`, of a generation config with the
    user's `overrides` in it. `do_sample: false` is temperature 0, unless these name another."""
    values = {field: found[key] for key, field in _SERVED.items() if found.get(key) is not None}
    if _is_greedy(found) and overrides.get("temperature") is None:
        values["temperature"] = 0.0
    return values


def _is_greedy(found: Mapping[str, Any]) -> bool:
    """Whether someone chose it: in a file that transformers made of a `config.json` the key is that
    of an older format, where it was always there."""
    return found.get("do_sample") is False and not found.get("_from_model_config")


def record_generation_config(found: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Record what of a generation config is served in another way than it says."""
    temperature = sampling_defaults(found, overrides).get("temperature")
    if _is_greedy(found) and temperature == 0.0:
        why = "do_sample is false in the generation config; requests may have another"
        decisions.record("default temperature", temperature, why, found.get("temperature", 1.0))
    ignored = {key: value for key, value in found.items() if _is_ignored(key, value)}
    if found.get("do_sample") is False and not _is_greedy(found):
        ignored["do_sample"] = False
    if ignored:
        text = ", ".join(f"{key}: {value}" for key, value in sorted(ignored.items()))
        why = "served are do_sample, eos_token_id, " + ", ".join(_SERVED)
        decisions.record("generation config", "ignored in part", why, text)


def _is_ignored(key: str, value: Any) -> bool:
    if key in _SERVED or key in _NOT_SAMPLING or not value:
        return False
    return not (key in _NEUTRAL_AT_ONE and value == 1)
