# SPDX-License-Identifier: Apache-2.0
"""Compilation off the engine's thread, shared by equal constraints, over a real tokenizer."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import xgrammar

from tests.tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE, tiny_model
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.structured_output import StructuredOutputManager, manager
from vllm.v1.structured_output.spec import GrammarSpec

IM_START = 256 + SPECIAL_TOKENS.index("<|im_start|>")


@pytest.fixture(scope="module")
def config():
    return VllmConfig(
        model_config=ModelConfig(model=str(tiny_model("llama")), dtype="float32", max_model_len=64),
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(max_model_len=64),
        device_config=DeviceConfig(device="cpu"),
    )


@pytest.fixture
def grammars(config):
    made = StructuredOutputManager(config)
    yield made
    made.shutdown()
    made.shutdown()


def params(skip_special_tokens=True, **constraint):
    return SamplingParams(
        skip_special_tokens=skip_special_tokens,
        eos_token_ids=[EOS_TOKEN_ID],
        structured_outputs=StructuredOutputsParams(**constraint),
    )


def next_tokens(grammar):
    error = grammar._compiled.exception(timeout=60)
    assert error is None, error
    masks = np.zeros((1, grammar.num_words), dtype=np.int32)
    grammar.fill(masks, 0)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def test_an_end_that_the_model_does_not_have(grammars):
    given = params(choice=["a"])
    given.eos_token_ids = [VOCAB_SIZE, EOS_TOKEN_ID]
    grammar = grammars.start(given)
    (letter,) = next_tokens(grammar)
    assert grammar.accept(letter) and next_tokens(grammar) == {EOS_TOKEN_ID}


def test_free_text_has_no_grammar(grammars):
    assert grammars.start(SamplingParams()) is None and grammars.start(None) is None


def test_tokens_of_the_tokenizer(grammars, config):
    tokenizer = get_tokenizer(config.model_config.tokenizer)
    allowed = next_tokens(grammars.start(params(regex="[a-c]?")))
    assert allowed == {*tokenizer.encode("abc", add_special_tokens=False), EOS_TOKEN_ID}


def test_special_tokens_count_as_text_only_where_they_show(grammars):
    hidden = next_tokens(grammars.start(params(regex=".*")))
    shown = next_tokens(grammars.start(params(regex=".*", skip_special_tokens=False)))
    assert IM_START not in hidden and EOS_TOKEN_ID in hidden
    assert shown - hidden == {i for i in range(256, VOCAB_SIZE) if i != EOS_TOKEN_ID}


def test_json_has_no_control_characters_in_its_strings(grammars):
    schema = {"type": "string", "maxLength": 3}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for constraint in ({"json": schema}, {"structural_tag": json.dumps(tag)}):
        grammar = grammars.start(params(**constraint))
        start = next_tokens(grammar)
        assert len(start) == 1 and grammar.accept(start.pop())
        decode = byte_of_token(grammars)
        assert {decode[t] for t in next_tokens(grammar)} >= {32, 34, 65}
        assert not {decode[t] for t in next_tokens(grammar)} & set(range(32))


def byte_of_token(grammars):
    tokenizer = get_tokenizer(grammars._model_config.tokenizer)
    texts = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
    return {token: text[0] for token, text in enumerate(texts) if len(text) == 1}


def test_equal_constraints_are_compiled_once(grammars, monkeypatch):
    compiled = []
    compile_one = GrammarSpec.compile

    def count(self, compiler):
        compiled.append(self.source)
        return compile_one(self, compiler)

    monkeypatch.setattr(GrammarSpec, "compile", count)
    first = grammars.start(params(json={"type": "integer"}))
    second = grammars.start(params(json='{"type":  "integer"}'))
    assert next_tokens(first) == next_tokens(second) and len(compiled) == 1
    assert first is not second and first.accept(ord("!")) is False
    next_tokens(grammars.start(params(json={"type": "null"})))
    assert len(compiled) == 2


def test_start_does_not_wait_for_the_compiler(grammars, monkeypatch):
    release = threading.Event()
    compile_one = GrammarSpec.compile

    def slow(self, compiler):
        assert release.wait(60)
        return compile_one(self, compiler)

    monkeypatch.setattr(GrammarSpec, "compile", slow)
    grammar = grammars.start(params(regex="a"))
    assert not grammar.ready
    release.set()
    assert next_tokens(grammar) and grammar.ready


def test_failures_are_reported_and_not_kept(grammars):
    failed = grammars.start(params(regex="("))
    failed._compiled.exception(timeout=60)
    assert "not closed" in failed.compile_error()
    again = grammars.start(params(regex="("))
    assert again._compiled is not failed._compiled


def test_the_cache_is_bounded(grammars, monkeypatch):
    monkeypatch.setattr(manager, "_CACHE_BYTES", 1)
    first = grammars.start(params(regex="a"))
    next_tokens(first)
    second = grammars.start(params(regex="b"))
    next_tokens(second)
    grammars._threads.shutdown(wait=True)
    assert len(grammars._cache) == 0
    assert next_tokens(first), "who has a grammar keeps it"


def test_tokens_that_are_no_utf8_are_left_out(grammars):
    decode = byte_of_token(grammars)
    allowed = {decode.get(t) for t in next_tokens(grammars.start(params(regex="[^x]")))}
    assert allowed == {*range(128), *range(0xC2, 0xF5)} - {ord("x")}
