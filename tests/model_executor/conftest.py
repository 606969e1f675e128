# SPDX-License-Identifier: Apache-2.0
"""Model tests run on the reference kernels: they check models, not kernels."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def reference_kernels() -> Iterator[None]:
    from tests.model_executor.harness import naive_kernels

    with naive_kernels():
        yield
