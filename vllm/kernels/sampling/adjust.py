# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Per-request changes to logits, a batch at a time: biases, penalties, banned tokens and words.

Requests keep their own tensors; a table of int64 descriptors, one row per changed request, carries
their addresses, so a step is one upload and one to three launches whatever the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.sampling.adjustment_fields import Field
from vllm.utils.math_utils import cdiv

TILE = 4096
WORDS = 32

NUM_FIELDS = tl.constexpr(len(Field))
_MARKS = tl.constexpr(Field.MARKS.value)
_BIAS = tl.constexpr(Field.BIAS.value)
_REPETITION = tl.constexpr(Field.REPETITION.value)
_FREQUENCY = tl.constexpr(Field.FREQUENCY.value)
_PRESENCE = tl.constexpr(Field.PRESENCE.value)
_BANNED = tl.constexpr(Field.BANNED.value)
_NUM_BANNED = tl.constexpr(Field.NUM_BANNED.value)
_WORDS = tl.constexpr(Field.WORDS.value)
_STARTS = tl.constexpr(Field.STARTS.value)
_NUM_WORDS = tl.constexpr(Field.NUM_WORDS.value)
_RECENT = tl.constexpr(Field.RECENT.value)
_NUM_RECENT = tl.constexpr(Field.NUM_RECENT.value)
_NUM_PROMPT = tl.constexpr(Field.NUM_PROMPT.value)
_MIN_TOKENS = tl.constexpr(Field.MIN_TOKENS.value)
_DRAFTS = tl.constexpr(Field.DRAFTS.value)
_NUM_BEFORE = tl.constexpr(Field.NUM_BEFORE.value)
_REQUEST = tl.constexpr(Field.REQUEST.value)


@triton.jit
def _number(field_ptr):
    """The fp32 number whose bits a descriptor's field holds."""
    return tl.load(field_ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _change_kernel(
    logits_ptr, out_ptr, descriptor_ptr, order_ptr, stride_row, first,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, rows): bias, then the repetition, frequency and presence penalties. The logits
    are those of tokens from `first` on."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < VOCAB
    x = tl.load(logits_ptr + row * stride_row + index, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(order_ptr + row)
    if place >= 0:
        own = descriptor_ptr + place * NUM_FIELDS
        bias = tl.load(own + _BIAS)
        token = first + index
        if bias != 0:
            x += tl.load(bias.to(tl.pointer_type(tl.float32)) + token, mask=inside, other=0.0)
        marks = tl.load(own + _MARKS)
        if marks != 0:
            mark = tl.load(marks.to(tl.pointer_type(tl.int32)) + token, mask=inside, other=0)
            drafts = tl.load(own + _DRAFTS).to(tl.pointer_type(tl.int64))
            for j in range(tl.load(own + _NUM_BEFORE)):
                mark += tl.where(token == tl.load(drafts + j), 2, 0)
            repetition = _number(own + _REPETITION)
            scaled = tl.where(x > 0, x / repetition, x * repetition)
            x = tl.where(mark > 0, scaled, x)
            count = (mark >> 1).to(tl.float32)
            x -= _number(own + _FREQUENCY) * count
            x -= tl.where(count > 0, _number(own + _PRESENCE), 0.0)
    tl.store(out_ptr + row * VOCAB + index, x, mask=inside)


@triton.jit
def _ban_kernel(
    logits_ptr, descriptor_ptr, position_ptr, stride_row, first,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (descriptors): banned tokens, and last tokens of words that else stand complete.

    The logits are those of tokens from `first` on.
    Ids outside the vocabulary are left alone: their place in memory is another request's row.
    """
    own = descriptor_ptr + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    logits = logits_ptr + tl.load(own) * stride_row
    i = tl.arange(0, BLOCK)
    banned = tl.load(own + _BANNED).to(tl.pointer_type(tl.int64))
    num_output = tl.load(position_ptr + tl.load(own)) - tl.load(own + _NUM_PROMPT)
    too_short = num_output < tl.load(own + _MIN_TOKENS)
    num_banned = tl.where(too_short, tl.load(own + _NUM_BANNED), 0)
    for start in range(0, num_banned, BLOCK):
        token = tl.load(banned + start + i, mask=start + i < num_banned, other=-1) - first
        tl.store(logits + token, float("-inf"), mask=(token >= 0) & (token < VOCAB))
    words = tl.load(own + _WORDS).to(tl.pointer_type(tl.int64))
    starts = tl.load(own + _STARTS).to(tl.pointer_type(tl.int64))
    num_words = tl.load(own + _NUM_WORDS)
    num_recent = tl.load(own + _NUM_RECENT)
    # The newest tokens are the drafts before this row; before them come the recent ones.
    num_before = tl.load(own + _NUM_BEFORE)
    drafts_end = tl.load(own + _DRAFTS).to(tl.pointer_type(tl.int64)) + num_before
    recent_end = tl.load(own + _RECENT).to(tl.pointer_type(tl.int64)) + num_recent + num_before
    for start in range(0, num_words, BLOCK):
        there = start + i < num_words
        begin = tl.load(starts + start + i, mask=there, other=0)
        last = tl.load(starts + start + i + 1, mask=there, other=1) - 1
        matched = there
        # From the newest token back, as far as any word of the block still agrees.
        back = 1
        length = tl.max(tl.where(matched, last - begin, 0), axis=0)
        while back <= length:
            compared = matched & (begin + back <= last)
            token = tl.load(words + last - back, mask=compared, other=0)
            drafted = back <= num_before
            known = (back > num_before) & (back <= num_recent + num_before)
            newest = tl.load(recent_end - back, mask=known, other=-1)
            newest = tl.where(drafted, tl.load(drafts_end - back, mask=drafted, other=-1), newest)
            matched &= (begin + back > last) | (token == newest)
            length = tl.max(tl.where(matched, last - begin, 0), axis=0)
            back += 1
        token = tl.load(words + last, mask=matched, other=-1) - first
        tl.store(logits + token, float("-inf"), mask=(token >= 0) & (token < VOCAB))


@triton.jit
def _observe_kernel(token_ptr, count_ptr, descriptor_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (descriptors): count a request's output tokens and append them to the recent ones."""
    own = descriptor_ptr + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    if tl.load(own + _NUM_BEFORE) > 0:
        return
    first = tl.load(own)
    num_tokens = tl.load(count_ptr + tl.load(own + _REQUEST))
    marks = tl.load(own + _MARKS)
    if marks != 0:
        for j in range(num_tokens):
            token = tl.load(token_ptr + first + j)
            known = (token >= 0) & (token < VOCAB)
            mark_ptr = marks.to(tl.pointer_type(tl.int32)) + token
            tl.store(mark_ptr, tl.load(mark_ptr, mask=known, other=0) + 2, mask=known)
            tl.debug_barrier()
    recent = tl.load(own + _RECENT).to(tl.pointer_type(tl.int64))
    length = tl.load(own + _NUM_RECENT)
    i = tl.arange(0, BLOCK)
    # A block reads what it and later blocks overwrite, before it writes.
    for start in range(0, length, BLOCK):
        place = start + i
        old = tl.load(recent + place + num_tokens, mask=place + num_tokens < length, other=0)
        new = (place < length) & (place + num_tokens >= length)
        token = tl.load(token_ptr + first + place + num_tokens - length, mask=new, other=0)
        tl.debug_barrier()
        tl.store(recent + place, tl.where(new, token, old), mask=place < length)
        tl.debug_barrier()


def change_logits(logits: Tensor, descriptors: Tensor, order: Tensor, first: int = 0) -> Tensor:
    """A fresh fp32 copy of `logits [n, tokens]`, of tokens from `first` on, with biases and
    penalties.

    `descriptors [m, len(Field)]` int64; `order [n]` int32: each row's descriptor, -1 for none.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows:
        _change_kernel[(cdiv(vocab, TILE), rows)](
            logits, out, descriptors, order, logits.stride(0), first, VOCAB=vocab, TILE=TILE
        )
    return out


def ban_tokens(logits: Tensor, descriptors: Tensor, positions: Tensor, first: int = 0) -> None:
    """Set what the descriptors ban to -inf, in place; `logits [n, tokens]` of tokens from `first`
    on, `positions [n]` int64 of the tokens to sample."""
    _ban_kernel[(len(descriptors),)](
        logits,
        descriptors,
        positions,
        logits.stride(0),
        first,
        VOCAB=logits.shape[1],
        BLOCK=WORDS,
        num_warps=1,
    )


def observe_tokens(token_ids: Tensor, counts: Tensor, descriptors: Tensor, vocab_size: int) -> None:
    """Add what was output of the sampled `token_ids [n]` int64 to the counts and recent tokens:
    `counts [k]` int32 of each request that sampled, from its first row on.

    A row that had no token to sample has -1, which no count and no word contains.
    """
    _observe_kernel[(len(descriptors),)](
        token_ids, counts, descriptors, VOCAB=vocab_size, BLOCK=WORDS, num_warps=1
    )
