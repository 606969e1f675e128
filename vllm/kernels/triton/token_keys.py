# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Integers that order as logits do, for searches over the values a logit can take."""

import torch
import triton
import triton.language as tl

#: trailing bits that are always zero in the fp32 form of a logit
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def key_of(x, ZERO_BITS: tl.constexpr):
    """The int32 key of an fp32 value, without the bits that are always zero."""
    bits = x.to(tl.int32, bitcast=True) >> ZERO_BITS
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> ZERO_BITS))


@triton.jit
def value_of(key, ZERO_BITS: tl.constexpr):
    """The fp32 value of a key."""
    bits = key ^ ((key >> 31) & (0x7FFFFFFF >> ZERO_BITS))
    return (bits << ZERO_BITS).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    """Upper middle of two keys, which may be as far apart as int32 reaches."""
    return ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
