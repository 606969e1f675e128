# SPDX-License-Identifier: Apache-2.0
"""Equal to Triton's, which they stand in for."""

import triton

from vllm.utils.math_utils import cdiv, next_power_of_2


def test_equal_to_tritons() -> None:
    for n in [*range(1, 300), 65535, 65536, 65537]:
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for size in (1, 3, 16, 64, 1000):
            assert cdiv(n - 1, size) == triton.cdiv(n - 1, size)
