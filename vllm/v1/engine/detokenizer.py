# SPDX-License-Identifier: Apache-2.0
"""Text from tokens as they come: whole characters only, and nothing of a stop string leaks."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

#: prompt tokens the decoder sees as context, for spaces that depend on the token before
_CONTEXT = 8
_REPLACEMENT = "\ufffd"
_made: weakref.WeakKeyDictionary[PreTrainedTokenizerFast, dict[bool, WholeTexts]]
_made = weakref.WeakKeyDictionary()


class TokenDecoder(ABC):
    """Turns one token after the other into text."""

    @abstractmethod
    def decode(self, token_id: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""


class StreamDecoder(TokenDecoder):
    """Decoding by the `tokenizers` library; with `whole` only where a token is not enough."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: list[int],
        skip_special_tokens: bool,
        whole: WholeTexts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._whole = whole
        known = [t for t in context if t < self._size]
        #: None: the text so far ends with a whole character
        self._stream: DecodeStream | None = None
        if whole is None or not whole.end_whole(known):
            self._stream = DecodeStream(ids=known, skip_special_tokens=skip_special_tokens)

    def decode(self, token_id: int) -> str:
        if self._stream is None:
            assert self._whole is not None
            text = self._whole[token_id]
            if text is not None:
                return text
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        text = self._step(token_id, self._stream)
        if text and self._whole is not None:
            self._stream = None
        return text

    def _step(self, token_id: int, stream: DecodeStream) -> str:
        if token_id >= self._size:
            return ""  # padded vocabularies have ids without text
        try:
            return stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            if "Invalid prefix encountered" not in str(error):
                raise
            # The stream gives up on byte sequences that are no text at all. Start afresh, but not
            # at the beginning of a text, where decoders of SentencePiece would drop a space.
            before = self._tokenizer.encode("a", add_special_tokens=False).ids
            self._stream = DecodeStream(ids=before, skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""


class WindowDecoder(TokenDecoder):
    """Decoding by a Python tokenizer: the difference made by the newest token in a short window."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: list[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        self._ids = list(context)
        self._start = 0
        self._done = len(context)

    def decode(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._text(self._ids[self._start : self._done])
        after = self._text(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, **self._options)
        assert isinstance(text, str)
        return text


class SpecialTokenSpacing(TokenDecoder):
    """Without spaces between special tokens: drops the leading space of one after another."""

    def __init__(self, inner: TokenDecoder, special_ids: set[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids
        self._after_special = False

    def decode(self, token_id: int) -> str:
        text = self._inner.decode(token_id)
        special = token_id in self._special_ids
        if special and self._after_special:
            text = text.lstrip(" ")
        self._after_special = special
        return text


def make_decoder(
    tokenizer: PreTrainedTokenizerBase, prompt_token_ids: list[int], params: SamplingParams
) -> TokenDecoder:
    """The decoder for one request."""
    context = prompt_token_ids[-_CONTEXT:]
    skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
    decoder: TokenDecoder
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        whole = whole_texts(tokenizer, skip)
        decoder = StreamDecoder(tokenizer.backend_tokenizer, context, skip, whole)
    else:
        decoder = WindowDecoder(tokenizer, context, skip, spaces)
    if not spaces and not skip:
        decoder = SpecialTokenSpacing(decoder, set(tokenizer.all_special_ids))
    return decoder


class Detokenizer:
    """Text of one completion, with stop strings.

    Without a tokenizer (or with `detokenize=False`) the text stays empty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        self._decoder: TokenDecoder | None = None
        if tokenizer is not None and params.detokenize:
            self._decoder = make_decoder(tokenizer, prompt_token_ids, params)
        assert not isinstance(params.stop, str)
        self._stop = params.stop or []
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        longest = max(map(len, self._stop), default=1)
        #: characters kept back in streams because they could begin a stop string
        self._held_back = 0 if self._include_stop else longest - 1
        #: whether text is certain as soon as it is there
        self.sends_at_once = not self._stop
        self.token_ids: list[int] = []
        self._text = ""
        #: behind `_text`
        self._new_texts: list[str] = []
        self._num_sent = 0

    @property
    def text(self) -> str:
        """All text so far, up to a stop string."""
        if self._new_texts:
            self._text += "".join(self._new_texts)
            self._new_texts.clear()
        return self._text

    def pass_on(self, token_ids: list[int]) -> str:
        """Add tokens and take their new text; where text is sent at once, and all so far was."""
        self.token_ids += token_ids
        if self._decoder is None:
            return ""
        decode = self._decoder.decode
        if len(token_ids) == 1:
            text = decode(token_ids[0])
        else:
            text = "".join([decode(token_id) for token_id in token_ids])
        self._new_texts.append(text)
        self._num_sent += len(text)
        return text

    def update(self, new_token_ids: list[int], ends_with_stop_token: bool) -> str | None:
        """Add tokens; returns the stop string if one is now complete (the text is cut there).

        `ends_with_stop_token`: the last token ended the request, so its text is left out unless
        stops are wanted in the output.
        """
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            last = i + 1 == len(new_token_ids)
            if self._decoder is None or (last and ends_with_stop_token and not self._include_stop):
                continue
            new_text = self._decoder.decode(token_id)
            self._new_texts.append(new_text)
            if self._stop and new_text and len(self.token_ids) >= self._min_tokens:
                found = self._find_stop(len(new_text))
                if found is not None:
                    return found
        return None

    def _find_stop(self, num_new_chars: int) -> str | None:
        """The stop string that ends first in the text; cuts the text."""
        ends: list[tuple[int, int, str]] = []
        text = self.text
        for stop in self._stop:
            begin = max(0, len(text) - num_new_chars - len(stop) + 1)
            at = text.find(stop, begin)
            if at >= 0:
                ends.append((at + len(stop), at, stop))
        if not ends:
            return None
        end, at, stop = min(ends)
        self._text = text[: end if self._include_stop else at]
        return stop

    def sendable(self, finished: bool) -> str:
        """The text that no later token can take back."""
        if finished or not self._held_back:
            return self.text
        return self.text[: -self._held_back] if len(self.text) > self._held_back else ""

    def take_new_text(self, finished: bool) -> str:
        """What became sendable since the last call."""
        text = self.text
        held_back = 0 if finished else self._held_back
        start, end = self._num_sent, len(text) - held_back
        if end <= start:
            return ""
        self._num_sent = end
        return text[start:end]


class WholeTexts(dict[int, "str | None"]):
    """Token id -> its text, decoded at the first look; None where bytes of other tokens may be
    needed to make characters of its own.

    A byte-level decoder joins the tokens' bytes and reads them as UTF-8: behind whole characters, a
    token of whole characters adds exactly its own text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = ""
        if token_id < self._size:  # padded vocabularies have ids without text
            text = self.decode([token_id])
            if _REPLACEMENT in text:
                text = None
        self[token_id] = text
        return text

    def decode(self, token_ids: list[int]) -> str:
        """The text of several tokens."""
        decoded: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens
        )
        return decoded

    def end_whole(self, token_ids: list[int]) -> bool:
        """Whether the text of these tokens ends with a whole character."""
        return not self.decode(token_ids).endswith(_REPLACEMENT)


def whole_texts(tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool) -> WholeTexts | None:
    """The texts of a byte-level tokenizer, shared by all requests; None for other tokenizers."""
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, ByteLevel):
        return None
    made = _made.setdefault(tokenizer, {})
    if skip_special_tokens not in made:
        made[skip_special_tokens] = WholeTexts(backend, skip_special_tokens)
    return made[skip_special_tokens]
