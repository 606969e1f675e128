# SPDX-License-Identifier: Apache-2.0
"""`text_offset` of logprobs: where each token begins in the text that the client gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import TokenDecoder, make_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextOffsets:
    """Offsets of generated tokens, decoded with the prompt before them, as the engine does.

    A token that adds no text of its own (a special token that is skipped, the first bytes of a
    character) begins where the next text does. `start`: characters before the first token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: list[int],
        params: SamplingParams,
        start: int,
    ) -> None:
        self._decoder: TokenDecoder | None = None
        if tokenizer is not None and params.detokenize:
            self._decoder = make_decoder(tokenizer, prompt_ids, params)
        self._end = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens `[n]`, in characters."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            if self._decoder is not None:
                self._end += len(self._decoder.decode(token_id))
        return offsets


@dataclass(frozen=True)
class Echo:
    """What stands before a choice's own text: the prompt's text, and for logprobs where each of
    its tokens begins there; nothing without `echo`."""

    text: str = ""
    offsets: Sequence[int] = ()

    def then(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: list[int],
        params: SamplingParams,
    ) -> TextOffsets:
        """Counts where the generated tokens of one choice begin."""
        return TextOffsets(tokenizer, prompt_ids, params, len(self.text))


def prompt_offsets(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], text: str
) -> list[int]:
    """Where the tokens `[n]` of an echoed prompt begin in `text`.

    A special token has no width unless the text shows it: the tokenizer may have added it, or the
    text may be a decoding without it.
    """
    special = set(tokenizer.all_special_ids)
    decoder = make_decoder(tokenizer, [], SamplingParams(skip_special_tokens=False))
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(min(end, len(text)))
        piece = decoder.decode(token_id)
        if token_id not in special or text.startswith(piece, end):
            end += len(piece)
    return offsets
