# SPDX-License-Identifier: Apache-2.0
"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.protocol.completion import CompletionLogprobs
from vllm.entrypoints.openai.token_bytes import token_bytes
from vllm.logprobs import Logprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: JSON has no -inf; clients compare with this figure
_FLOOR = -9999.0

#: one position: token id -> its logprob; the actual token is always among them
Position = dict[int, Logprob]


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > _FLOOR else _FLOOR


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """The token's text, or `token_id:N` when asked for or when there is no text."""
    if as_ids or entry.decoded_token is None:
        return _id_text(token_id)
    return entry.decoded_token


def _by_text(position: Position, as_ids: bool) -> dict[str, float]:
    """Every token of a position. Several may have one text, such as parts of a character: it is the
    first one's, which is the actual token if that is among them, and the others are `token_id:N`.
    """
    texts: dict[str, float] = {}
    for token_id, entry in position.items():
        text = token_text(token_id, entry, as_ids)
        key = _id_text(token_id) if text in texts else text
        texts[key] = _finite(entry.logprob)
    return texts


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    *,
    as_ids: bool,
    decode: Callable[[int], str],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """Parallel lists over `token_ids` [n]; `offsets` [n]: where each begins in the reply's text.

    A position without logprobs, such as the first one of a prompt, gets nulls, and its text from
    `decode`.
    """
    reply = CompletionLogprobs(text_offset=list(offsets))
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = position[token_id] if position else Logprob(0.0, None, decode(token_id))
        reply.tokens.append(token_text(token_id, entry, as_ids))
        reply.token_logprobs.append(_finite(entry.logprob) if position else None)
        reply.top_logprobs.append(_by_text(position, as_ids) if position else None)
    return reply


def _chat_entry(
    token_id: int, entry: Logprob, as_ids: bool, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    text, known = entry.decoded_token, None
    if tokenizer is not None and text is not None:
        known = token_bytes(tokenizer, token_id, text)
    return {
        "token": token_text(token_id, entry, as_ids),
        "logprob": _finite(entry.logprob),
        "bytes": known,
    }


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position],
    *,
    num_top: int,
    as_ids: bool,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """`{"content": [...]}` with one entry per token [n] and its `num_top` best alternatives.

    `num_top` -1 lists the whole vocabulary. `tokenizer` knows the bytes of tokens, without it they
    are null.
    """
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        top = ranked if num_top < 0 else ranked[:num_top]
        entry = _chat_entry(token_id, position[token_id], as_ids, tokenizer)
        entry["top_logprobs"] = [_chat_entry(t, e, as_ids, tokenizer) for t, e in top]
        content.append(entry)
    return {"content": content}


def prompt_logprobs(
    positions: Sequence[Position | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Per prompt position null or token id -> `{logprob, rank, decoded_token}`."""
    if positions is None:
        return None
    return [
        {
            str(t): {
                "logprob": _finite(e.logprob),
                "rank": e.rank,
                "decoded_token": e.decoded_token,
            }
            for t, e in position.items()
        }
        if position
        else None
        for position in positions
    ]
