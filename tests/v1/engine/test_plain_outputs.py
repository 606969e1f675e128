# SPDX-License-Identifier: Apache-2.0
"""Tokens of requests that just go on: as arrays on the wire, and the same outputs at the end."""

from __future__ import annotations

import asyncio

import pytest

from tests.v1.engine.tokenizer_fixture import make_tokenizer
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.output_stream import OutputStream, Wakes
from vllm.v1.engine.plain_outputs import (
    PlainOutputsPacker,
    PlainOutputsUnpacker,
    split_tokens,
)
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


class Wire:
    """Both ends of the socket."""

    def __init__(self) -> None:
        self.packer, self.unpacker = PlainOutputsPacker(), PlainOutputsUnpacker()
        self.sizes: list[int] = []

    def cross(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        frame = MsgpackEncoder().encode(self.packer.pack(outputs))
        self.sizes.append(len(frame))
        arrived = MsgpackDecoder(EngineCoreOutputs).decode(frame)
        self.unpacker.unpack(arrived)
        return arrived


def message(plain: dict[str, list[int]], *others: EngineCoreOutput) -> EngineCoreOutputs:
    rows = [EngineCoreOutput(request_id, tokens) for request_id, tokens in plain.items()]
    return EngineCoreOutputs([*rows, *others], timestamp=5.0, num_plain=len(rows))


def test_tokens_arrive_with_their_requests_and_ids_travel_once() -> None:
    wire = Wire()
    last = EngineCoreOutput("c", [9], finish_reason=FinishReason.LENGTH)
    steps = [
        message({"a": [1], "b": [2]}),
        message({"a": [3], "b": [4]}),
        message({"a": [5, 6, 7], "b": [8]}, last),
        message({}, last),
        message({"a": [10], "b": [11]}),
        message({"b": [12]}),
    ]
    for step in steps:
        arrived = wire.cross(step)
        others = step.outputs[step.num_plain :]
        assert [o.request_id for o in arrived.outputs] == [o.request_id for o in others]
        assert arrived.timestamp == 5.0 and arrived.num_plain == 0
        if step.num_plain:
            assert arrived.plain is not None and arrived.plain.request_ids is not None
            tokens = dict(zip(arrived.plain.request_ids, split_tokens(arrived.plain), strict=True))
            assert tokens == {o.request_id: o.new_token_ids for o in step.outputs[: step.num_plain]}
        else:
            assert arrived.plain is None
    assert wire.sizes[1] < wire.sizes[0]


def test_a_message_stays_as_the_scheduler_made_it() -> None:
    made = message({"a": [1]})
    PlainOutputsPacker().pack(made)
    assert len(made.outputs) == 1 and made.plain is None


KINDS = {
    "delta": {"output_kind": RequestOutputKind.DELTA},
    "cumulative": {"output_kind": RequestOutputKind.CUMULATIVE},
    "final": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "stop": {"output_kind": RequestOutputKind.DELTA, "stop": ["quick b"]},
    "n": {"output_kind": RequestOutputKind.DELTA, "n": 2},
    "ids": {"output_kind": RequestOutputKind.DELTA, "detokenize": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_step", [1, 2])
def test_plain_outputs_give_what_full_ones_give(kind: str, per_step: int) -> None:
    """The same tokens, once all in full rows and once as the scheduler sends them."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("the quick brown é漢🙂 fox stops here")

    def run(wire: Wire | None) -> tuple[object, ...]:
        processor = OutputProcessor(tokenizer)
        got: list[object] = []

        def take(output: RequestOutput | Exception) -> None:
            assert isinstance(output, RequestOutput)
            for one in output.outputs:
                shown = (one.index, one.text, list(one.token_ids), one.finish_reason)
                got.append((shown, one.stop_reason, output.finished, output.num_cached_tokens))

        request = EngineCoreRequest(
            "r-x", [1, 2], SamplingParams(max_tokens=99, **KINDS[kind]), 0.0
        )
        running = [r.request_id for r in processor.add_request(request, "r", "the prompt", take)]
        stats, aborted = IterationStats(), []
        for start in range(0, len(ids), per_step):
            tokens, end = ids[start : start + per_step], start + per_step >= len(ids)
            reason = FinishReason.LENGTH if end else None
            rows = [EngineCoreOutput(r, tokens, finish_reason=reason) for r in running]
            if start == 0:
                for row in rows:
                    row.times, row.num_cached_tokens = (1.0, 2.0), 1
            made = EngineCoreOutputs(rows, timestamp=3.0 + start)
            if wire is not None:
                made.num_plain = 0 if start == 0 or end else len(rows)
                made = wire.cross(made)
            aborted += processor.process_outputs(made, stats).aborts
        counted = (stats.num_generation_tokens, stats.inter_token_latencies)
        return got, counted, [one.num_generation_tokens for one in stats.finished], aborted

    plain, full = run(Wire()), run(None)
    assert plain == full
    assert plain[0]


def test_plain_outputs_of_requests_that_are_gone_are_dropped() -> None:
    processor, wire, got = OutputProcessor(None), Wire(), []
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    for name in ("a", "b"):
        request = EngineCoreRequest(name, [1], params, 0.0)
        processor.add_request(request, name, None, got.append)
    processor.process_outputs(wire.cross(message({"a": [1], "b": [2]})))
    assert len(got) == 2
    processor.drop_requests(["a"])
    processor.process_outputs(wire.cross(message({"a": [3], "b": [4]})))
    assert [output.request_id for output in got] == ["a", "b", "b"]
    # The id comes again, while the core's message says "the same requests as before".
    processor.add_request(EngineCoreRequest("a", [1], params, 0.0), "a", None, got.append)
    processor.process_outputs(wire.cross(message({"a": [5], "b": [6]})))
    assert [list(output.outputs[0].token_ids) for output in got[3:]] == [[5], [6]]


def output(text: str) -> RequestOutput:
    from vllm.outputs import CompletionOutput

    return RequestOutput("r", None, [1], None, [CompletionOutput(0, text, [7])], False)


def test_held_consumers_get_what_came_meanwhile_at_once_but_first_outputs_do_not_wait() -> None:
    async def main() -> None:
        wakes = Wakes()
        old, new = (OutputStream(RequestOutputKind.DELTA, wakes) for _ in range(2))
        taken: list[str] = []

        async def consume(name: str, stream: OutputStream) -> None:
            while True:
                taken.append(name + (await stream.get()).outputs[0].text)

        tasks = [asyncio.create_task(consume(*pair)) for pair in (("old ", old), ("new ", new))]
        await asyncio.sleep(0)
        old.put(output("0"))
        await asyncio.sleep(0.01)
        wakes.hold()
        old.put(output("1"))
        new.put(output("a"))
        await asyncio.sleep(0.01)
        assert taken == ["old 0", "new a"]
        old.put(output("2"))
        wakes.release()
        old.put(output("3"))
        await asyncio.sleep(0.01)
        assert taken == ["old 0", "new a", "old 123"]
        wakes.hold()
        old.fail(RuntimeError("gone"))
        await asyncio.sleep(0.01)
        assert tasks[0].done() and "gone" in str(tasks[0].exception())
        tasks[1].cancel()

    asyncio.run(main())


def as_output(text: str, token_ids: list[int]) -> RequestOutput:
    made = output(text)
    made.outputs[0].token_ids = token_ids
    return made


def test_text_goes_to_who_takes_it_if_its_consumer_waits_and_has_all_before() -> None:
    async def main() -> None:
        wakes, taken, got, takes = Wakes(), [], [], True

        def take(index: int, text: str, num_tokens: int) -> bool:
            if text == "bad":
                raise ValueError(text)
            if takes:
                taken.append((index, text, num_tokens))
            return takes

        stream = OutputStream(RequestOutputKind.DELTA, wakes, take)

        def put(text: str) -> None:
            stream.put_text(0, text, [1], as_output)

        async def consume() -> None:
            while True:
                got.append((await stream.get()).outputs[0])

        put("0")  # nobody waits yet
        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        put("1")
        assert [one.text for one in got] == ["0"] and taken == [(0, "1", 1)]
        stream.put(output("2"))
        put("3")  # behind an output that was not taken
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [one.text for one in got] == ["0", "23"] and len(taken) == 1
        wakes.hold()
        put("4")
        put("5")
        assert len(taken) == 1
        wakes.release()
        assert taken[1:] == [(0, "45", 2)]
        takes = False  # the connection is full
        wakes.hold()
        put("6")
        put("7")
        wakes.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert got[-1].text == "67" and got[-1].token_ids == [1, 1]
        takes = True
        wakes.hold()
        put("8")
        stream.put(output("9"))  # the end of the reply, say
        wakes.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert got[-1].text == "89" and len(taken) == 2
        put("bad")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert isinstance(task.exception(), ValueError)

    asyncio.run(main())
