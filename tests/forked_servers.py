# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' servers, forked as other programs of the tests are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks import served_process
from tests.forked_python import ForkedPython


def _start(arguments: list[str], environment: dict[str, str] | None) -> ForkedPython:
    option, module, *rest = arguments
    assert option == "-m"
    return ForkedPython(module, rest, sys.__stderr__, env=environment, session=True)


@contextmanager
def forked_servers() -> Iterator[None]:
    """Each `ServedProcess` meanwhile: a new interpreter would import everything, for seconds."""
    with mock.patch.object(served_process, "start_python", _start):
        yield
