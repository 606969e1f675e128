# SPDX-License-Identifier: Apache-2.0
"""Texts of real (tiny) models follow their constraints, whatever the schedule does."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest

from tests.tiny_models import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.state import SchedulerState
from vllm.v1.engine.llm_engine import LLMEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 1, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", 3]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
}
CHOICES = ["yes", "no", "perhaps, but I would rather not say"]
REGEX = r"[A-F]{5,30}(-[0-9]{2}){1,4}"
GRAMMAR = 'root ::= "(" inner ")"\ninner ::= [a-z]{1,20} | "[" inner "]"{1,2}'
WHITESPACE_FREE = {"disable_any_whitespace": True}


def is_schema(text):
    jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))
    return True


CASES = {
    "json": ({"json": SCHEMA, **WHITESPACE_FREE}, is_schema),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": ({"grammar": GRAMMAR}, lambda text: re.fullmatch(r"\(\[*[a-z]{1,20}\]*\)", text)),
}


@pytest.fixture(
    scope="module",
    params=[("llama", False), ("llama", True), ("qwen3_5", True)],
    ids=["llama-sync", "llama-async", "qwen3_5-async"],
)
def engine(request):
    family, async_scheduling = request.param
    made = LLMEngine(
        EngineArgs(
            model=str(tiny_model(family)),
            dtype="float32",
            max_model_len=192,
            max_num_seqs=8,
            max_num_batched_tokens=24,
            num_gpu_blocks_override=40 if family == "llama" else 20,
            async_scheduling=async_scheduling,
            enforce_eager=True,
        ).create_engine_config(),
        multiprocess=False,
    )
    yield made
    made.shutdown()


def generate(engine, requests):
    """Completions by (request, index); deltas are put together."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, {"prompt": prompt}, params)
    texts, reasons = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            delta = requests[output.request_id][1].output_kind is RequestOutputKind.DELTA
            for one in output.outputs:
                key = (output.request_id, one.index)
                texts[key] = texts.get(key, "") + one.text if delta else one.text
                reasons[key] = one.finish_reason
    return texts, reasons


def make_requests():
    requests = {}
    for name, (constraint, _) in CASES.items():
        for variant in range(4):
            requests[f"{name} {variant}"] = (
                f"{name} {variant} " * (3 + 2 * variant),
                SamplingParams(
                    temperature=0.0 if variant == 0 else 1.0,
                    n=3 if variant == 1 else 1,
                    seed=variant,
                    top_k=5 if variant == 2 else 0,
                    logprobs=1 if variant == 3 else None,
                    frequency_penalty=0.5 if variant == 3 else 0.0,
                    max_tokens=120,
                    output_kind=RequestOutputKind.DELTA
                    if variant == 2
                    else RequestOutputKind.FINAL_ONLY,
                    structured_outputs=StructuredOutputsParams(**constraint),
                ),
            )
    requests["free"] = ("free " * 5, SamplingParams(temperature=0.0, max_tokens=100))
    return requests


def test_every_text_follows_its_constraint(engine, monkeypatch):
    preempted = []
    preempt = SchedulerState._preempt_last

    def count(self):
        preempted.append(self.running[-1].request_id)
        preempt(self)

    monkeypatch.setattr(SchedulerState, "_preempt_last", count)
    texts, reasons = generate(engine, make_requests())
    assert any("free" not in request_id for request_id in preempted), "the arena is too large"
    for (request_id, index), text in texts.items():
        if request_id != "free":
            follows = CASES[request_id.split()[0]][1]
            assert reasons[request_id, index] == "stop", (request_id, text)
            assert follows(text), (request_id, text)
    assert len(texts) == 4 * 6 + 1
    assert len({texts["regex 1", index] for index in range(3)}) == 3


def test_texts_depend_on_neither_neighbours_nor_schedule(engine):
    requests = {k: v for k, v in make_requests().items() if k.split()[0] in ("json", "regex")}
    together, _ = generate(engine, requests)
    for request_id in ("json 1", "regex 0", "regex 2"):
        alone, _ = generate(engine, {request_id: requests[request_id]})
        assert alone == {key: together[key] for key in alone}


def test_without_a_mask_the_models_say_something_else(engine, monkeypatch):
    """The other tests would be worth nothing if these models liked JSON."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    texts, _ = generate(engine, {"free": ("json 0 " * 3, params)})
    assert not texts["free", 0].startswith("{")


def test_a_ban_on_all_that_may_follow_ends_the_request(engine):
    requests = {
        f"{temperature}": (
            "hello",
            SamplingParams(
                temperature=temperature,
                seed=0,
                max_tokens=20,
                bad_words=["y", "ye", "yes"],
                structured_outputs=StructuredOutputsParams(choice=["yes"]),
            ),
        )
        for temperature in (0.0, 1.0)
    }
    texts, reasons = generate(engine, requests)
    assert set(texts.values()) == {""} and set(reasons.values()) == {"error"}
