# SPDX-License-Identifier: Apache-2.0
"""A small byte-level tokenizer, made once."""

from __future__ import annotations

import pytest

from tests.v1.engine.tokenizer_fixture import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()
