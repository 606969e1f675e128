# SPDX-License-Identifier: Apache-2.0
"""When a request stops."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus


def check_stop(request: Request) -> bool:
    """Set the final status if the newest token ends the request.

    An end-of-sequence token leaves `stop_reason` None; a stop token id is its own reason. Stop
    tokens do not count below `min_tokens`, the length limits always do, and so does the end of a
    grammar: nothing could follow it.
    """
    params = request.sampling_params
    assert params is not None
    output = request.output_token_ids
    token = output[-1]
    if token in request.stop_ids and len(output) >= params.min_tokens:
        request.status = RequestStatus.FINISHED_STOPPED
        if token != request.eos_token_id or params.ignore_eos:
            request.stop_reason = token
        return True
    if request.grammar is not None and request.grammar.terminated:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if len(request.all_token_ids) >= request.length_limit:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
