# SPDX-License-Identifier: Apache-2.0
"""A request of which no token is left ends with an error, and no other request notices."""

from __future__ import annotations

import pytest

from tests.tiny_models import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.results import nothing_to_sample
from vllm.v1.engine import RequestConflict
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request):
    made = LLMEngine(
        EngineArgs(
            model=str(tiny_model("llama")),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            num_gpu_blocks_override=40,
            async_scheduling=request.param,
            enforce_eager=True,
        ).create_engine_config(),
        multiprocess=False,
    )
    yield made
    made.shutdown()


def run(engine, **requests):
    """The last output of every request."""
    for request_id, params in requests.items():
        engine.add_request(request_id, [1, 2, 3], params)
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    return last


def letters(engine, text):
    return engine.get_tokenizer().encode(text, add_special_tokens=False)


PLAIN = {"max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1, "logprobs": 3},
        {"temperature": 1.0, "seed": 1, "top_k": 2, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.5, "n": 2},
    ],
    ids=str,
)
def test_it_ends_where_nothing_is_left(engine, extra):
    """The word "aa" bars the second a, and nothing but an a is allowed."""
    (a,) = letters(engine, "a")
    free = SamplingParams(temperature=0.0, logprobs=1, **PLAIN)
    alone = run(engine, free=free)["free"].outputs[0]
    dead = SamplingParams(allowed_token_ids=[a], bad_words=["aa"], **PLAIN, **extra)
    last = run(engine, dead=dead, free=free)
    for completion in last["dead"].outputs:
        assert completion.finish_reason == "error" and list(completion.token_ids) == [a]
    assert last["free"].outputs[0].token_ids == alone.token_ids
    assert last["free"].outputs[0].finish_reason == "length"
    assert engine.reset_prefix_cache()


def test_allowed_and_banned_sample_what_is_left(engine):
    a, b = letters(engine, "ab")
    params = SamplingParams(
        allowed_token_ids=[a, b], bad_words=["aa"], temperature=1.0, seed=4, **PLAIN
    )
    tokens = list(run(engine, one=params)["one"].outputs[0].token_ids)
    assert len(tokens) == 12 and set(tokens) == {a, b} and b"aa" not in bytes(tokens)


def test_a_grammar_of_banned_words_ends_with_an_error(engine):
    grammar = StructuredOutputsParams(regex="(yes|yet)")
    params = SamplingParams(structured_outputs=grammar, bad_words=["yes", "yet"], max_tokens=8)
    (completion,) = run(engine, dead=params)["dead"].outputs
    assert completion.finish_reason == "error" and completion.text == "ye"


def test_contradictions_known_at_once_are_refused(engine):
    eos = engine.get_tokenizer().eos_token_id
    for fields in (
        {"allowed_token_ids": [eos], "min_tokens": 4},
        {"allowed_token_ids": letters(engine, "a"), "bad_words": ["a"]},
    ):
        with pytest.raises(VLLMValidationError, match="nothing could be generated"):
            run(engine, no=SamplingParams(**fields))


def test_whose_fault_it_is():
    """Without anything barred, the model's logits are to blame: that is no client's error."""
    barred = Request("r", [1], SamplingParams(allowed_token_ids=[1]))
    assert isinstance(nothing_to_sample(barred), RequestConflict)
    assert nothing_to_sample(Request("r", [1], SamplingParams())) == (
        "the model's logits are not numbers"
    )
