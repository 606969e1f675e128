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

from vllm.kernels.adjustment_fields import Field
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
_NUM_WORDS = tl.constexpr(Field.NUM_WORDS.value)
_LONGEST = tl.constexpr(Field.LONGEST.value)
_RECENT = tl.constexpr(Field.RECENT.value)


@triton.jit
def _number(field_ptr):
    """The fp32 number whose bits a descriptor's field holds."""
    return tl.load(field_ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _change_kernel(
    logits_ptr, out_ptr, descriptor_ptr, order_ptr, stride_row,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, rows): bias, then the repetition, frequency and presence penalties."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < VOCAB
    x = tl.load(logits_ptr + row * stride_row + index, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(order_ptr + row)
    if place >= 0:
        own = descriptor_ptr + place * NUM_FIELDS
        bias = tl.load(own + _BIAS)
        if bias != 0:
            x += tl.load(bias.to(tl.pointer_type(tl.float32)) + index, mask=inside, other=0.0)
        marks = tl.load(own + _MARKS)
        if marks != 0:
            mark = tl.load(marks.to(tl.pointer_type(tl.int32)) + index, mask=inside, other=0)
            repetition = _number(own + _REPETITION)
            scaled = tl.where(x > 0, x / repetition, x * repetition)
            x = tl.where(mark > 0, scaled, x)
            count = (mark >> 1).to(tl.float32)
            x -= _number(own + _FREQUENCY) * count
            x -= tl.where(count > 0, _number(own + _PRESENCE), 0.0)
    tl.store(out_ptr + row * VOCAB + index, x, mask=inside)


@triton.jit
def _ban_kernel(logits_ptr, descriptor_ptr, stride_row, BLOCK: tl.constexpr):
    """Grid (descriptors): banned tokens, and last tokens of words that else stand complete."""
    own = descriptor_ptr + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    logits = logits_ptr + tl.load(own) * stride_row
    i = tl.arange(0, BLOCK)
    banned = tl.load(own + _BANNED).to(tl.pointer_type(tl.int64))
    num_banned = tl.load(own + _NUM_BANNED)
    for start in range(0, num_banned, BLOCK):
        token = tl.load(banned + start + i, mask=start + i < num_banned, other=0)
        tl.store(logits + token, float("-inf"), mask=start + i < num_banned)
    words = tl.load(own + _WORDS).to(tl.pointer_type(tl.int64))
    recent = tl.load(own + _RECENT).to(tl.pointer_type(tl.int64))
    num_words, longest = tl.load(own + _NUM_WORDS), tl.load(own + _LONGEST)
    for start in range(0, num_words, BLOCK):
        matched = start + i < num_words
        word = words + (start + i) * longest
        for j in range(0, longest - 1):
            token = tl.load(word + j, mask=start + i < num_words, other=-1)
            matched &= (token == -1) | (token == tl.load(recent + j))
        last = tl.load(word + longest - 1, mask=matched, other=0)
        tl.store(logits + last, float("-inf"), mask=matched)


@triton.jit
def _observe_kernel(token_ptr, descriptor_ptr):
    """Grid (descriptors): count the sampled token and append it to the recent ones."""
    own = descriptor_ptr + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    token = tl.load(token_ptr + tl.load(own))
    marks = tl.load(own + _MARKS)
    if marks != 0:
        mark_ptr = marks.to(tl.pointer_type(tl.int32)) + token
        tl.store(mark_ptr, tl.load(mark_ptr) + 2)
    if tl.load(own + _NUM_WORDS) > 0:
        recent = tl.load(own + _RECENT).to(tl.pointer_type(tl.int64))
        length = tl.load(own + _LONGEST) - 1
        for j in range(0, length - 1):
            tl.store(recent + j, tl.load(recent + j + 1))
        tl.store(recent + length - 1, token, mask=length > 0)


def change_logits(logits: Tensor, descriptors: Tensor, order: Tensor) -> Tensor:
    """A fresh fp32 copy of `logits [n, vocab]` with biases and penalties.

    `descriptors [m, len(Field)]` int64; `order [n]` int32: each row's descriptor, -1 for none.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows:
        _change_kernel[(cdiv(vocab, TILE), rows)](
            logits, out, descriptors, order, logits.stride(0), VOCAB=vocab, TILE=TILE
        )
    return out


def ban_tokens(logits: Tensor, descriptors: Tensor) -> None:
    """Set what the descriptors ban to -inf, in place; `logits [n, vocab]`."""
    _ban_kernel[(len(descriptors),)](
        logits, descriptors, logits.stride(0), BLOCK=WORDS, num_warps=1
    )


def observe_tokens(token_ids: Tensor, descriptors: Tensor) -> None:
    """Add the sampled `token_ids [n]` int64 to the counts and recent tokens."""
    _observe_kernel[(len(descriptors),)](token_ids, descriptors, num_warps=1)
