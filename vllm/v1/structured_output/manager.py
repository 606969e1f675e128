# SPDX-License-Identifier: Apache-2.0
"""Grammars of the engine core: compiled on threads of their own, once per constraint."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.structured_output.grammar import CompiledConstraint, RequestGrammar
from vllm.v1.structured_output.mask_words import pack_tokens
from vllm.v1.structured_output.reasoning_limit import TokenTexts
from vllm.v1.structured_output.spec import GrammarKind, GrammarSpec
from vllm.v1.structured_output.vocabulary import Utf8Guard, end_tokens, full_vocabulary

if TYPE_CHECKING:
    import xgrammar

    from vllm.config import VllmConfig

_COMPILE_THREADS = 2
#: compiled grammars kept, by their own count of bytes
_CACHE_BYTES = 512 << 20

#: the constraint, and whether special tokens count as text
_Key = tuple[GrammarSpec, bool]
#: whether special tokens count as text, and the bytes that no token may hold
_Vocabulary = tuple[bool, bytes]


@dataclass(frozen=True)
class _Compiler:
    """A compiler for one vocabulary, with what depends on the vocabulary alone."""

    compiler: xgrammar.GrammarCompiler
    guard: Utf8Guard
    texts: TokenTexts


class StructuredOutputManager:
    """Gives each constrained request its grammar; the scheduler holds it back until it is ready.

    Nothing is loaded before the first constrained request.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.model_config is not None
        self._model_config = vllm_config.model_config
        self._any_whitespace = not vllm_config.structured_outputs_config.disable_any_whitespace
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Future[CompiledConstraint]] = OrderedDict()
        self._compilers: dict[_Vocabulary, _Compiler] = {}
        self._compilers_lock = threading.Lock()

    def start(self, params: SamplingParams | None) -> RequestGrammar | None:
        """Begin (or share) the compilation for a request; None for an unconstrained one."""
        if params is None or params.structured_outputs is None:
            return None
        spec = GrammarSpec.from_params(params.structured_outputs, self._any_whitespace)
        special_as_text = not params.skip_special_tokens or spec.kind is GrammarKind.STRUCTURAL_TAG
        vocab_size = self._model_config.get_vocab_size()
        allowed = params.allowed_token_ids
        reasoning = params.structured_outputs.reasoning
        ends = end_tokens(params, vocab_size)
        compiled = self._compiled((spec, special_as_text), ends)
        if reasoning is not None:
            compiled.add_done_callback(partial(_prepare_spelling, reasoning.end.encode()))
        return RequestGrammar(
            compiled,
            vocab_size,
            ends,
            params.min_tokens,
            params.stop_token_ids,
            None if allowed is None else pack_tokens(allowed, vocab_size),
            reasoning,
        )

    def shutdown(self) -> None:
        """Give up what is not compiled yet; safe to call twice."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- cache ---------------------------------------------------------------------------------

    def _compiled(self, key: _Key, stop_ids: list[int]) -> Future[CompiledConstraint]:
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")
            compiled = self._threads.submit(self._compile, key, stop_ids)
            self._cache[key] = compiled
        compiled.add_done_callback(lambda _: self._trim())
        return compiled

    def _trim(self) -> None:
        """Drop failed grammars, and the least recently used ones beyond the cache's size."""
        with self._lock:
            sizes: dict[_Key, int] = {}
            for key, future in list(self._cache.items()):
                if not future.done():
                    continue
                if future.cancelled() or future.exception() is not None:
                    del self._cache[key]
                else:
                    sizes[key] = future.result().grammar.memory_size_bytes
            total = sum(sizes.values())
            for key, size in sizes.items():
                if total <= _CACHE_BYTES:
                    break
                del self._cache[key]
                total -= size

    # ---- compiling (on the threads) ------------------------------------------------------------

    def _compile(self, key: _Key, stop_ids: list[int]) -> CompiledConstraint:
        spec, special_as_text = key
        found = self._compiler((special_as_text, spec.barred_bytes), stop_ids)
        return CompiledConstraint(spec.compile(found.compiler), found.guard, found.texts)

    def _compiler(self, which: _Vocabulary, stop_ids: list[int]) -> _Compiler:
        import xgrammar

        with self._compilers_lock:
            if which not in self._compilers:
                model = self._model_config
                tokenizer = get_tokenizer(
                    model.tokenizer,
                    tokenizer_mode=model.tokenizer_mode,
                    trust_remote_code=model.trust_remote_code,
                    revision=model.tokenizer_revision,
                )
                vocabulary = full_vocabulary(tokenizer, model.get_vocab_size(), stop_ids, *which)
                compiler = xgrammar.GrammarCompiler(
                    vocabulary, max_threads=max(1, (os.cpu_count() or 2) // 4), cache_enabled=False
                )
                texts = vocabulary.decoded_vocab
                self._compilers[which] = _Compiler(compiler, Utf8Guard(texts), TokenTexts(texts))
            return self._compilers[which]


def _prepare_spelling(text: bytes, compiled: Future[CompiledConstraint]) -> None:
    """On the compiler's thread, so that the scheduler does not wait for it."""
    if not compiled.cancelled() and compiled.exception() is None:
        compiled.result().texts.spellings(text)
