# SPDX-License-Identifier: Apache-2.0
"""Turns of the event loop; what the handler does with streams is in `test_async_llm`."""

from __future__ import annotations

from tests.v1.engine.fakes import fake_logprobs
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_handler import turns
from vllm.v1.serial_utils import logprobs_to_wire


def test_outputs_with_logprobs_take_more_turns_of_the_event_loop() -> None:
    plain = [EngineCoreOutput(str(i), [1]) for i in range(300)]
    assert [len(part) for part in turns(plain)] == [128, 128, 44]
    wire = logprobs_to_wire(fake_logprobs([1], 20))
    scored = [EngineCoreOutput(str(i), [1], wire) for i in range(30)]
    assert [len(part) for part in turns(scored)] == [11, 11, 8]
    huge = EngineCoreOutput("r", [1], logprobs_to_wire(fake_logprobs([1], 1000)))
    assert [len(part) for part in turns([plain[0], huge, plain[1]])] == [1, 1, 1]
    assert list(turns([])) == []
