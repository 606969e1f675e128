# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Barring tokens by bit masks."""

import triton
import triton.language as tl
from torch import Tensor

from vllm.utils.math_utils import cdiv

BLOCK = 4096


@triton.jit(do_not_specialize=["words_stride"])
def _mask_tokens_kernel(
    logits_ptr,
    row_ptr,
    word_ptr,
    stride_row,
    words_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (masked rows, blocks of tokens); bit `t % 32` of word `t // 32` allows token t."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + mask)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < VOCAB
    word = tl.load(word_ptr + mask * words_stride + token // 32, mask=exists, other=-1)
    barred = (word >> (token % 32)) & 1 == 0
    tl.store(logits_ptr + row * stride_row + token, float("-inf"), mask=barred & exists)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    vocab = logits.shape[1]
    grid = (rows.shape[0], cdiv(vocab, BLOCK))
    _mask_tokens_kernel[grid](
        logits,
        rows,
        words,
        logits.stride(0),
        words.stride(0),
        VOCAB=vocab,
        BLOCK=BLOCK,
    )
