# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of launches. Triton's functions of these names cost microseconds a call."""


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for `b > 0`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, for `n >= 1`."""
    return 1 << (n - 1).bit_length()
