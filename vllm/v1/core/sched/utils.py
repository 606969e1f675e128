# SPDX-License-Identifier: Apache-2.0
"""When a request stops."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus


def check_stop(request: Request, max_model_len: int) -> bool:
    """Set the final status if the newest token ends the request.

    An end-of-sequence token leaves `stop_reason` None; a stop token id is its own reason. Stop
    tokens do not count below `min_tokens`, the length limits always do, and so does the end of a
    grammar: nothing could follow it.
    """
    params = request.sampling_params
    assert params is not None
    output = request.output_token_ids
    token = output[-1]
    if len(output) >= params.min_tokens:
        if token == request.eos_token_id and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if params.stop_token_ids and token in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token
            return True
    if request.grammar is not None and request.grammar.terminated:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if len(output) >= request.max_tokens or len(request.all_token_ids) >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
