# SPDX-License-Identifier: Apache-2.0
"""Constraints are checked in the front end, so that a bad one never reaches the engine."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.json_schema import check_schema
from vllm.v1.structured_output.spec import GrammarKind, GrammarSpec
from vllm.v1.structured_output.vocabulary import (
    added_token_vocabulary,
    byte_vocabulary,
    end_tokens,
)

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

    from vllm.config import StructuredOutputsConfig

_PARAMETER = "structured_outputs"
#: hashes of checked specs remembered
_REMEMBERED = 1024
#: "[12:00:00] /source/file.cc:123: " before the compiler's messages
_PLACE = re.compile(r"^\[[^\]]*\] \S+: ")


class StructuredOutputValidator:
    """Refuses what cannot be compiled or never be followed; remembers what it has checked."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        config: StructuredOutputsConfig,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._any_whitespace = not config.disable_any_whitespace
        self._checked: OrderedDict[bytes, None] = OrderedDict()

    def finish(self, params: SamplingParams) -> None:
        """Check the constraint and leave a schema as text, which travels whatever its numbers.

        `params`: the engine's own copy, `eos_token_ids` filled in. Raises `VLLMValidationError`.
        """
        constraint = params.structured_outputs
        if constraint is None:
            return
        if self._tokenizer is None:
            raise VLLMValidationError(
                "structured_outputs need a tokenizer, but --skip-tokenizer-init is set; constrain "
                "with allowed_token_ids",
                _PARAMETER,
            )
        if not end_tokens(params, self._vocab_size):
            raise VLLMValidationError(
                "structured_outputs need an end-of-sequence token, but neither the tokenizer nor "
                "the checkpoint's generation config names one of the model's "
                f"{self._vocab_size} tokens",
                _PARAMETER,
            )
        _check_options(constraint)
        try:
            spec = GrammarSpec.from_params(constraint, self._any_whitespace)
            self._check_spec(spec)
        except ValueError as error:
            raise VLLMValidationError(f"structured_outputs: {error}", _PARAMETER) from None
        if constraint.json is not None:
            constraint.json = spec.source

    def _check_spec(self, spec: GrammarSpec) -> None:
        """Raise `ValueError` naming what is wrong; once for the good ones."""
        described = f"{spec.kind} {spec.any_whitespace} {spec.source}"
        digest = hashlib.sha256(described.encode()).digest()
        if digest not in self._checked:
            self._check_spec_once(spec)
        self._checked[digest] = None
        self._checked.move_to_end(digest)
        if len(self._checked) > _REMEMBERED:
            self._checked.popitem(last=False)

    def _check_spec_once(self, spec: GrammarSpec) -> None:
        if spec.kind is GrammarKind.JSON_SCHEMA:
            check_schema(json.loads(spec.source))
        elif spec.kind is GrammarKind.STRUCTURAL_TAG:
            for schema in _schemas_in(json.loads(spec.source)):
                check_schema(schema)
        try:
            if spec.kind is GrammarKind.STRUCTURAL_TAG:
                spec.compile(self._added_tokens)
            else:
                _check_start(spec.compile(self._bytes))
        except RuntimeError as error:
            message = _PLACE.sub("", str(error).strip())
            raise ValueError(f"{spec.kind.value} cannot be compiled: {message}") from None

    @cached_property
    def _bytes(self) -> xgrammar.GrammarCompiler:
        return _compiler(byte_vocabulary())

    @cached_property
    def _added_tokens(self) -> xgrammar.GrammarCompiler:
        assert self._tokenizer is not None
        return _compiler(added_token_vocabulary(self._tokenizer, self._vocab_size))


def _compiler(vocabulary: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    import xgrammar

    return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def check_form(constraint: StructuredOutputsParams) -> None:
    """Raise `VLLMValidationError` for an option that is not supported or a malformed value; what
    the grammar compiler refuses is found by `StructuredOutputValidator` alone."""
    _check_options(constraint)
    try:
        GrammarSpec.from_params(constraint)
    except ValueError as error:
        raise VLLMValidationError(f"structured_outputs: {error}", _PARAMETER) from None


def _check_options(constraint: StructuredOutputsParams) -> None:
    if constraint.whitespace_pattern is not None:
        raise VLLMValidationError(
            "structured_outputs.whitespace_pattern is not supported; use disable_any_whitespace "
            "or a regex",
            f"{_PARAMETER}.whitespace_pattern",
            constraint.whitespace_pattern,
        )
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(getattr(constraint, name), bool):
            raise VLLMValidationError(
                f"structured_outputs.{name} must be true or false", f"{_PARAMETER}.{name}"
            )


def _check_start(grammar: xgrammar.CompiledGrammar) -> None:
    """Raise `ValueError` for a grammar whose first byte does not exist."""
    import xgrammar

    mask = np.zeros((1, 9), dtype=np.int32)
    xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask)
    if not mask.any():
        raise ValueError("no text follows the grammar")


def _schemas_in(tag: Any) -> Iterator[Any]:
    """The JSON schemas anywhere inside a structural tag."""
    if isinstance(tag, dict):
        if "json_schema" in tag:
            yield tag["json_schema"]
        for key, value in tag.items():
            if key != "json_schema":
                yield from _schemas_in(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from _schemas_in(value)
