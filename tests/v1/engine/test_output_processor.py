# SPDX-License-Identifier: Apache-2.0
"""From core outputs to request outputs."""

from __future__ import annotations

import pickle

import pytest

from tests.v1.engine.fakes import fake_logprobs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestConflict,
)
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import logprobs_to_wire


def start(tokenizer, stream_interval=1, request_id="r", sink=None, **params):
    processor = OutputProcessor(tokenizer, stream_interval)
    add(processor, request_id, sink, **params)
    return processor


def add(processor, request_id="r", sink=None, prompt=(1, 2, 3), **params):
    request = EngineCoreRequest(f"{request_id}-x", list(prompt), SamplingParams(**params), 0.0)
    return processor.add_request(request, request_id, "the prompt", sink)


def send(processor, tokens, request_id="r-x", iteration=None, **fields):
    output = EngineCoreOutput(request_id, tokens, **fields)
    return processor.process_outputs(EngineCoreOutputs([output], timestamp=10.0), iteration)


def test_stop_string_aborts_in_the_core_and_cuts(tokenizer):
    ids = tokenizer.encode("the quick brown fox stops here")
    processor = start(tokenizer, stop=["brown"], max_tokens=100)
    outputs = []
    for token in ids:
        processed = send(processor, [token])
        outputs += processed.request_outputs
        if processed.aborts:
            break
    assert processed.aborts == ["r-x"]
    final = outputs[-1]
    assert final.request_id == "r" and final.finished and final.prompt == "the prompt"
    completion = final.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "the quick ",
        "stop",
        "brown",
    )
    assert not processor.has_unfinished_requests()
    assert send(processor, [5]).request_outputs == []  # a token that was in flight


def test_stop_string_waits_for_the_core_when_a_connector_has_a_say(tokenizer):
    ids = tokenizer.encode("the quick brown fox stops here")
    processor = OutputProcessor(tokenizer, core_sees_stops=True)
    add(processor, stop=["brown"], max_tokens=100, output_kind=RequestOutputKind.FINAL_ONLY)
    stops = []
    for token in ids:
        processed = send(processor, [token])
        stops += processed.stops
        assert not processed.aborts and not processed.request_outputs
    [stop] = stops
    assert stop.request_id == "r-x" and stop.num_output_tokens < len(ids)
    last = send(processor, [], finish_reason=FinishReason.STOP, kv_transfer_params={"path": "x"})
    [final] = last.request_outputs
    [completion] = final.outputs
    assert (completion.text, completion.finish_reason) == ("the quick ", "stop")
    assert completion.stop_reason == "brown" and final.kv_transfer_params == {"path": "x"}
    assert len(completion.token_ids) == stop.num_output_tokens
    assert not processor.has_unfinished_requests()


@pytest.mark.parametrize("text", ["the quick brown fox", "the quick red fox"])
def test_own_end_in_the_core_is_answered_with_the_last_token_of_the_reply(tokenizer, text):
    """One message may hold tokens after the stop string, or no stop string at all."""
    ids = tokenizer.encode(text)
    processor = OutputProcessor(tokenizer, core_sees_stops=True)
    add(processor, stop=["brown"], max_tokens=len(ids))
    processed = send(processor, ids, finish_reason=FinishReason.LENGTH, awaits_stop=True)
    assert not processed.request_outputs and not processed.aborts
    [stop] = processed.stops
    [final] = send(
        processor, [], finish_reason=FinishReason.LENGTH, kv_transfer_params={"path": "x"}
    ).request_outputs
    [completion] = final.outputs
    assert len(completion.token_ids) == stop.num_output_tokens
    assert final.kv_transfer_params == {"path": "x"}
    if "brown" in text:
        assert stop.num_output_tokens < len(ids) and completion.finish_reason == "stop"
    else:
        assert stop.num_output_tokens == len(ids) and completion.finish_reason == "length"


def test_own_end_after_a_stop_string_is_not_answered_again(tokenizer):
    processor = OutputProcessor(tokenizer, core_sees_stops=True)
    add(processor, stop=["brown"], max_tokens=100)
    assert len(send(processor, tokenizer.encode("brown")).stops) == 1
    last = send(processor, [7], finish_reason=FinishReason.LENGTH, awaits_stop=True)
    assert not last.stops and not last.request_outputs


def test_error_after_a_stop_string_is_an_error(tokenizer):
    processor = OutputProcessor(tokenizer, core_sees_stops=True)
    add(processor, stop=["brown"], max_tokens=100)
    assert send(processor, tokenizer.encode("brown")).stops
    [final] = send(
        processor, [], finish_reason=FinishReason.ERROR, error="the disk is full"
    ).request_outputs
    assert final.outputs[0].finish_reason == "error"


def test_stop_string_at_the_last_token_needs_no_abort(tokenizer):
    ids = tokenizer.encode("brown")
    processor = start(tokenizer, stop=["brown"])
    processed = send(
        processor, ids, finish_reason=FinishReason.LENGTH, kv_transfer_params={"path": "x"}
    )
    assert processed.aborts == []
    (final,) = processed.request_outputs
    assert final.outputs[0].finish_reason == "stop" and final.kv_transfer_params == {"path": "x"}


@pytest.mark.parametrize("core_sees_stops", [False, True])
def test_drafts_after_a_stop_string_were_not_accepted(tokenizer, core_sees_stops):
    """A step accepted six drafts in a row, and the string ends with the second or the last of them
    or with the token that followed them; what later steps did is not the reply's."""
    first, *run = tokenizer.encode("the quick brown fox")[:1] + tokenizer.encode("abcdefg")[-7:]
    assert len(run) == 7
    for kept, expected in ((2, (3, 9)), (6, (7, 5)), (7, (7, 5))):
        processor = OutputProcessor(tokenizer, core_sees_stops=core_sees_stops)
        add(processor, stop=["abcdefg"[kept - 1]], max_tokens=100)
        send(processor, [first], num_drafts=(1, 2))
        processed = send(processor, run, num_drafts=(7, 5))
        if core_sees_stops:
            processed = send(processor, [], finish_reason=FinishReason.STOP, num_drafts=(9, 12))
        [final] = processed.request_outputs
        [completion] = final.outputs
        assert len(completion.token_ids) == 1 + kept and completion.finish_reason == "stop"
        assert completion.num_drafts == expected


def test_logprobs_become_dicts_with_text(tokenizer):
    processor = start(tokenizer, logprobs=2, prompt_logprobs=1)
    assert (
        send(
            processor, [], new_prompt_logprobs=logprobs_to_wire(fake_logprobs([2], 1))
        ).request_outputs
        == []
    )
    wire = logprobs_to_wire(fake_logprobs([40, 41], 2))
    (output,) = send(
        processor,
        [40, 41],
        new_prompt_logprobs=logprobs_to_wire(fake_logprobs([3], 1)),
        new_logprobs=wire,
        finish_reason=FinishReason.LENGTH,
    ).request_outputs
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 3
    assert output.prompt_logprobs[1][2].rank == 3
    completion = output.outputs[0]
    first = completion.logprobs[0]
    assert list(first) == [40, 41, 42]
    assert first[40].logprob == -0.5 and first[40].rank == 1
    assert [first[i].rank for i in (41, 42)] == [1, 2]
    assert first[41].decoded_token == tokenizer.decode([41])
    assert completion.cumulative_logprob == pytest.approx(-0.5 - 1.5)


class Decodes:
    """Counts what is decoded."""

    def __init__(self, tokenizer):
        self.decode, self.num_decoded = tokenizer.decode, 0

    def __call__(self, token_ids, **options):
        self.num_decoded += 1
        return self.decode(token_ids, **options)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_are_made_at_the_first_look(tokenizer, monkeypatch, kind):
    decodes = Decodes(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", decodes)
    processor = start(tokenizer, prompt_logprobs=1, output_kind=kind)
    wires = [logprobs_to_wire(fake_logprobs([token], 1)) for token in (2, 3)]
    made = send(processor, [], new_prompt_logprobs=wires[0]).request_outputs
    made += send(processor, [40], new_prompt_logprobs=wires[1]).request_outputs
    made += send(processor, [41], finish_reason=FinishReason.LENGTH).request_outputs
    assert len(made) == (1 if kind is RequestOutputKind.FINAL_ONLY else 2)
    first, last = made[0], made[-1]
    assert decodes.num_decoded == 0 and first.num_logprobs == 4
    copied = pickle.loads(pickle.dumps(first))
    num_decoded = decodes.num_decoded
    assert num_decoded == 4  # tokens 2, 3, 3, 4, and what they stand behind
    rows = first.prompt_logprobs
    assert rows is first.prompt_logprobs and copied.prompt_logprobs == rows
    assert rows[0] is None and [list(row) for row in rows[1:]] == [[2, 3], [3, 4]]
    if kind is RequestOutputKind.CUMULATIVE:
        assert last.prompt_logprobs is rows
    elif kind is RequestOutputKind.DELTA:
        assert last.prompt_logprobs is None and last.num_logprobs == 0
        first.add(last, aggregate=True)
        assert first.prompt_logprobs is rows
    assert decodes.num_decoded == num_decoded
    first.drop_logprobs()
    assert first.prompt_logprobs is None and first.num_logprobs == 0


def test_the_sampled_token_appears_once_when_it_is_among_the_top(tokenizer):
    lists = fake_logprobs([40], 2)
    lists.token_ids[0] = [40, 41, 40]
    processor = start(tokenizer, logprobs=2)
    (output,) = send(processor, [40], new_logprobs=logprobs_to_wire(lists)).request_outputs
    assert list(output.outputs[0].logprobs[0]) == [40, 41]


def test_stream_interval_sends_the_first_then_every_nth_and_the_last(tokenizer):
    processor = start(
        tokenizer, stream_interval=4, output_kind=RequestOutputKind.DELTA, max_tokens=100
    )
    ids = tokenizer.encode("the quick brown fox stops here hello world")
    counts, text = [], ""
    for i, token in enumerate(ids):
        last = i + 1 == len(ids)
        reason = FinishReason.LENGTH if last else None
        for output in send(processor, [token], finish_reason=reason).request_outputs:
            counts.append(len(output.outputs[0].token_ids))
            text += output.outputs[0].text
    assert counts[0] == 1 and set(counts[1:-1]) <= {4} and sum(counts) == len(ids)
    assert text == "the quick brown fox stops here hello world"


def test_children_have_their_own_ids_and_seeds(tokenizer):
    processor = OutputProcessor(tokenizer)
    children = add(processor, n=3, seed=2**63 - 2)
    assert [c.request_id for c in children] == ["0_r-x", "1_r-x", "2_r-x"]
    assert [c.sampling_params.seed for c in children] == [2**63 - 2, 2**63 - 1, 0]
    assert all(c.sampling_params.n == 1 for c in children)


def test_n_final_output_carries_transfer_parameters_of_every_child(tokenizer):
    processor = start(tokenizer, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    done = {"finish_reason": FinishReason.LENGTH}
    assert not send(processor, [40], "1_r-x", kv_transfer_params={"p": 1}, **done).request_outputs
    (final,) = send(processor, [41], "0_r-x", kv_transfer_params={"p": 0}, **done).request_outputs
    assert [c.index for c in final.outputs] == [0, 1] and final.kv_transfer_params == {"p": [0, 1]}
    assert [c.kv_transfer_params for c in final.outputs] == [{"p": 0}, {"p": 1}]


def test_aborting_reports_to_sinks_and_covers_all_children(tokenizer):
    received = []
    processor = start(tokenizer, sink=received.append, n=2)
    aborted, outputs = processor.abort_requests(["r", "nobody"])
    assert aborted == ["0_r-x", "1_r-x"] and outputs == []
    assert received[-1].finished
    assert processor.external_ids() == []


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 3])
def test_errors_reach_the_sink_at_once(tokenizer, n, kind):
    received = []
    processor = start(tokenizer, sink=received.append, n=n, output_kind=kind)
    failing = "r-x" if n == 1 else "1_r-x"
    send(processor, [], failing, finish_reason=FinishReason.ERROR, error="rows are missing")
    (error,) = received
    assert isinstance(error, EngineGenerateError)
    assert str(error) == "request r failed: rows are missing"


def test_a_conflict_is_the_clients_error(tokenizer):
    received = []
    processor = start(tokenizer, sink=received.append)
    conflict = RequestConflict("nothing can follow")
    send(processor, [], finish_reason=FinishReason.ERROR, error=conflict)
    (error,) = received
    assert isinstance(error, VLLMValidationError) and error.message == "nothing can follow"


def test_duplicate_ids_are_refused_before_anything_is_kept(tokenizer):
    processor = start(tokenizer)
    with pytest.raises(VLLMValidationError, match="already in use"):
        add(processor)
    assert processor.get_num_unfinished_requests() == 1


def test_statistics(tokenizer):
    processor = start(tokenizer, max_tokens=7)
    state = processor.request_states["r-x"]
    state.stats.arrival_ts = 4.0
    iteration = IterationStats()
    send(processor, [40], iteration=iteration, times=(5.0, 6.0))
    state.stats.last_token_ts = state.stats.first_token_ts = 8.0
    send(processor, [41], iteration=iteration, finish_reason=FinishReason.LENGTH)
    assert (iteration.num_prompt_tokens, iteration.num_generation_tokens) == (3, 2)
    assert iteration.times_to_first_token == [6.0] and iteration.inter_token_latencies == [2.0]
    (finished,) = iteration.finished
    assert (finished.queued_time, finished.prefill_time, finished.decode_time) == (1.0, 2.0, 2.0)
    assert (finished.e2e_latency, finished.time_per_output_token) == (6.0, 2.0)
    assert (finished.inference_time, finished.max_tokens) == (4.0, 7)


def test_the_longest_completion_is_reported_once(tokenizer):
    processor = start(tokenizer, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    iteration = IterationStats()
    for request_id, tokens in (("0_r-x", [40, 41, 42]), ("1_r-x", [43])):
        output = EngineCoreOutput(request_id, tokens, finish_reason=FinishReason.LENGTH)
        processor.process_outputs(EngineCoreOutputs([output], timestamp=1.0), iteration)
    assert [one.longest_completion for one in iteration.finished] == [None, 3]


def test_the_count_of_cached_tokens_comes_once(tokenizer):
    kind = RequestOutputKind.DELTA
    processor = start(tokenizer, max_tokens=7, output_kind=kind)
    iteration = IterationStats()
    (first,) = send(processor, [40], iteration=iteration, num_cached_tokens=2).request_outputs
    (later,) = send(processor, [41], iteration=iteration).request_outputs
    send(processor, [42], iteration=iteration, finish_reason=FinishReason.LENGTH)
    assert (first.num_cached_tokens, later.num_cached_tokens) == (2, 2)
    assert iteration.num_cached_tokens == iteration.finished[0].num_cached_tokens == 2
