# SPDX-License-Identifier: Apache-2.0
"""From request fields to `SamplingParams`."""

from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.protocol.sampling import GenerationRequest, structured_outputs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

#: parameters that the checkpoint's generation config may give defaults for
_WITH_SERVER_DEFAULT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve_max_tokens(
    requested: int | None,
    default: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    server_cap: int | None,
) -> int:
    """How many tokens may be generated after a prompt of `num_prompt_tokens`.

    `default` applies when nothing was requested, None meaning the rest of the context; only then
    is it cut to what fits. `server_cap` is the limit set by the generation config.

    Raises `VLLMValidationError` when prompt and request do not fit `max_model_len`.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise VLLMValidationError(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt "
            f"has {num_prompt_tokens} tokens and at least one must be left for the output. Please "
            "shorten the prompt.",
            parameter="prompt",
            value=num_prompt_tokens,
        )
    if requested is not None and requested > room:
        raise VLLMValidationError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {requested} output tokens and the prompt has {num_prompt_tokens} tokens. "
            f"Please ask for at most {room} output tokens or shorten the prompt.",
            parameter="max_tokens",
            value=requested,
        )
    if requested is None:
        requested = room if default is None else min(default, room)
    return requested if server_cap is None else min(requested, server_cap)


def build_sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: Mapping[str, Any],
    detokenize: bool,
    placement: str | list[str] | None = None,
) -> SamplingParams:
    """The engine's parameters; unset fields come from `defaults`, then from the class.

    Raises `VLLMValidationError` naming the bad parameter.
    """
    values = {name: getattr(request, name) for name in _WITH_SERVER_DEFAULT}
    values = {k: defaults.get(k) if v is None else v for k, v in values.items()}
    extra_args = dict(request.vllm_xargs or {})
    if request.kv_transfer_params is not None:
        extra_args["kv_transfer_params"] = request.kv_transfer_params
    return SamplingParams.from_optional(
        n=None if request.use_beam_search else request.n,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words,
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        detokenize=detokenize,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        structured_outputs=structured_outputs(request.response_format, request.structured_outputs),
        extra_args=extra_args or None,
        placement=placement,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        **values,
    )
