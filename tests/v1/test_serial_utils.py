# SPDX-License-Identifier: Apache-2.0
"""Messages survive the wire."""

from __future__ import annotations

from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

from tests.v1.engine.fakes import fake_logprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    UtilityOutput,
)
from vllm.v1.serial_utils import (
    MsgpackDecoder,
    MsgpackEncoder,
    logprobs_from_wire,
    logprobs_to_wire,
    pack_object,
)


def round_trip(message, message_type):
    return MsgpackDecoder(message_type).decode(MsgpackEncoder().encode(message))


def test_request():
    params = SamplingParams(
        n=3,
        stop=["a"],
        seed=2**63 - 1,
        logit_bias={5: 1.5},
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(regex="x"),
        extra_args={"kv_transfer_params": {"path": PurePosixPath("/x"), "k": [1, None, "é"]}},
    )
    request = EngineCoreRequest("id", [1, 2], params, 1.5, eos_token_id=0, priority=-2)
    assert round_trip(request, EngineCoreRequest) == request


def test_outputs():
    outputs = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                "id",
                [5],
                new_logprobs=logprobs_to_wire(fake_logprobs([5], 2)),
                finish_reason=FinishReason.STOP,
                stop_reason="x",
                kv_transfer_params={"nested": {"a": [1, 2.5, None]}},
                times=(1.0, 2.0),
            )
        ],
        scheduler_stats=SchedulerStats(num_running=3, accepted_per_position=[1]),
        timestamp=9.0,
    )
    assert round_trip(outputs, EngineCoreOutputs) == outputs


def test_logprobs_keep_values_and_types():
    lists = fake_logprobs([1, 2, 3], 2)
    lists.logprobs[0, 0] = -np.inf
    wide = type(lists)(lists.token_ids.astype(np.int64), lists.logprobs, lists.ranks)
    back = logprobs_from_wire(logprobs_to_wire(wide))
    assert back.token_ids.dtype == np.int32 and back.logprobs.dtype == np.float32
    assert (back.token_ids == lists.token_ids).all() and (back.ranks == lists.ranks).all()
    assert (back.logprobs == lists.logprobs).all()


@pytest.mark.parametrize(
    "value", [None, 5, "x", (1, {2}), {"a": (1,)}, {1: b"x"}, PurePosixPath("/x")]
)
def test_utility_results_keep_their_type(value):
    back = round_trip(UtilityOutput(1, result=pack_object(value)), UtilityOutput).result
    assert back == value and type(back) is type(value)


def test_tensors_and_arrays():
    tensor = torch.arange(6).reshape(2, 3)
    back = round_trip(UtilityOutput(1, result=pack_object([tensor])), UtilityOutput).result
    assert torch.equal(back[0], tensor)


def test_functions_need_consent(monkeypatch):
    offset = 4
    for value in (lambda x: x + offset, (lambda x: x,), {"f": [len]}):
        with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
            pack_object(value)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    frame = MsgpackEncoder().encode(pack_object(lambda x: x + offset))
    assert MsgpackDecoder(object).decode(frame)(1) == 5
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        MsgpackDecoder(object).decode(frame)
