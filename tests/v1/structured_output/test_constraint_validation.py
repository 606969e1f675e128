# SPDX-License-Identifier: Apache-2.0
"""What the front end refuses before the engine sees it."""

from __future__ import annotations

import json

import pytest

from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.structured_output import validation
from vllm.v1.structured_output.spec import GrammarSpec
from vllm.v1.structured_output.validation import StructuredOutputValidator
from vllm.v1.structured_output.vocabulary import end_tokens


@pytest.fixture(scope="module")
def tokenizer():
    return get_tokenizer(str(tiny_model("llama")))


@pytest.fixture
def validator(tokenizer):
    return StructuredOutputValidator(tokenizer, VOCAB_SIZE, StructuredOutputsConfig())


def params(eos=(EOS_TOKEN_ID,), **constraint):
    return SamplingParams(
        eos_token_ids=list(eos), structured_outputs=StructuredOutputsParams(**constraint)
    )


def tag(**form):
    return json.dumps({"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": {"enum": [2**80]}},
        {"json_object": True},
        {"regex": "[a-z]+"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a" root | "b"'},
        {"structural_tag": tag(type="const_string", value="x")},
        {"structural_tag": tag(type="token", token="<|im_start|>")},
        {
            "json_object": True,
            "disable_any_whitespace": True,
            "disable_additional_properties": True,
        },
    ],
)
def test_accepted(validator, constraint):
    given = params(**constraint)
    validator.finish(given)
    assert given.structured_outputs.json is None or isinstance(given.structured_outputs.json, str)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "whole"}}, "unknown type"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater than maximum"),
        ({"json": {"type": "object", "properties": {"a": False}}}, "cannot accept any value"),
        ({"json": False}, "cannot accept any value"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": "{"}, "not valid JSON"),
        ({"regex": "("}, "not closed"),
        ({"regex": "a(?=b)"}, "Lookahead"),
        ({"regex": "(" * 20000 + "a" + ")" * 20000}, "Nest layer"),
        ({"choice": []}, "at least one"),
        ({"grammar": "start: 'a'"}, "EBNF"),
        ({"grammar": 'root ::= root "a"'}, "no text follows"),
        ({"structural_tag": "{}"}, "format"),
        ({"structural_tag": tag(type="nope")}, "nope"),
        ({"structural_tag": tag(type="token", token="<|none|>")}, "not found"),
        ({"structural_tag": tag(type="token", token=VOCAB_SIZE)}, "range"),
        ({"structural_tag": tag(type="json_schema", json_schema={"not": {}})}, "not is not"),
        ({"regex": "a", "whitespace_pattern": " "}, "disable_any_whitespace"),
        ({"regex": "a", "disable_any_whitespace": 1}, "true or false"),
    ],
)
def test_refused(validator, constraint, message):
    with pytest.raises(VLLMValidationError, match=message) as error:
        validator.finish(params(**constraint))
    assert error.value.parameter.split(".")[0] == "structured_outputs"
    assert "/project/" not in error.value.message


def test_needs_a_tokenizer_and_an_end():
    without = StructuredOutputValidator(None, VOCAB_SIZE, StructuredOutputsConfig())
    with pytest.raises(VLLMValidationError, match="skip-tokenizer-init"):
        without.finish(params(regex="a"))
    without.finish(SamplingParams())


@pytest.mark.parametrize("eos", [(), (VOCAB_SIZE,)])
def test_needs_an_end_of_sequence(validator, eos):
    with pytest.raises(VLLMValidationError, match="end-of-sequence"):
        validator.finish(params(eos=eos, regex="a"))


def test_end_tokens_are_of_the_vocabulary() -> None:
    """Checkpoints write -1 for none; the grammar failed on it."""
    given = params(regex="a")
    given.update_from_generation_config({"eos_token_id": [-1, 3, VOCAB_SIZE]}, EOS_TOKEN_ID)
    assert sorted(end_tokens(given, VOCAB_SIZE)) == [3, EOS_TOKEN_ID]


def test_a_constraint_is_checked_once(validator, monkeypatch):
    from vllm.v1.structured_output import validation

    checked = []
    monkeypatch.setattr(validation, "check_schema", checked.append)
    for _ in range(3):
        validator.finish(params(json={"type": "integer"}))
    assert len(checked) == 1


def test_the_servers_whitespace(tokenizer):
    config = EngineArgs(
        model=str(tiny_model("llama")),
        structured_outputs_config={"disable_any_whitespace": True},
    ).create_engine_config()
    assert config.structured_outputs_config.disable_any_whitespace
    validator = StructuredOutputValidator(tokenizer, VOCAB_SIZE, config.structured_outputs_config)
    validator.finish(params(json={"type": "integer"}))
    with pytest.raises(VLLMValidationError, match="backend"):
        StructuredOutputsConfig(backend="outlines")
    bad = EngineArgs(model=str(tiny_model("llama")), structured_outputs_config={"fallback": True})
    with pytest.raises(VLLMValidationError, match="unknown key 'fallback'"):
        bad.create_engine_config()


def test_what_was_checked_is_not_checked_again(validator, monkeypatch):
    compiled = []
    compile_spec = GrammarSpec.compile
    monkeypatch.setattr(
        GrammarSpec, "compile", lambda spec, c: compiled.append(spec) or compile_spec(spec, c)
    )
    monkeypatch.setattr(validation, "_REMEMBERED", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        validator.finish(params(regex=regex))
    with pytest.raises(VLLMValidationError):
        validator.finish(params(regex="("))
    with pytest.raises(VLLMValidationError):
        validator.finish(params(regex="("))
    assert [spec.source for spec in compiled] == ["a", "b", "c", "b", "(", "("]
