# SPDX-License-Identifier: Apache-2.0
"""Processes that a test has left: other modules of this process may have left some before it."""

from __future__ import annotations

import psutil


class OwnChildren:
    """Those of this process that are not there yet when this is made."""

    def __init__(self) -> None:
        self._before = self._all()

    @staticmethod
    def _all() -> frozenset[int]:
        return frozenset(child.pid for child in psutil.Process().children())

    def are_gone(self) -> bool:
        return self._all() <= self._before
