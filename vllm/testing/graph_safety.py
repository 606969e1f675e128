# SPDX-License-Identifier: Apache-2.0
"""For tests of model and kernel authors: that a module or function can be part of a graph.

It is a pytest plugin, too: with `pytest_plugins = ["vllm.testing.graph_safety"]` in a `conftest.py`
the fixture `assert_graph_safe` is there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm.compilation.graph_safety.report import Report, as_table
from vllm.compilation.graph_safety.targets import check_object


def assert_graph_safe(target: object) -> Report:
    """Check a module, a class of modules or a function by its source; see docs/graph-safety.md.

    Raises AssertionError that lists the hazards with file, line and replacement, and
    VLLMValidationError for what cannot be checked.
    """
    report = check_object(target)
    if not report.is_clean:
        raise AssertionError("not safe inside a graph:\n" + as_table([report]))
    return report


@pytest.fixture(name="assert_graph_safe")
def _assert_graph_safe() -> Callable[[object], Report]:
    """`assert_graph_safe` of this module."""
    return assert_graph_safe
