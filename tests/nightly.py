# SPDX-License-Identifier: Apache-2.0
"""Cases that run every night only: more of what the cases beside them test."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameter sets of these values; one that is a tuple gives several parameters."""
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.nightly)
        for v in values
    ]
