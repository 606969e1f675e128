# SPDX-License-Identifier: Apache-2.0
"""What a process made is not a forked child's: the child has a copy, but none of the threads."""

from __future__ import annotations

import os
from collections.abc import Callable


class OwnProcess:
    """Remembers the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this is that process, not a forked child of it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise `RuntimeError` in a forked child."""
        if not self.is_own:
            raise RuntimeError(
                f"this engine belongs to process {self._pid}; a forked child ({os.getpid()}) has "
                "none of its threads: make an engine of its own in the child, or use this one in "
                "its parent"
            )

    def run_if_own(self, function: Callable[[], None]) -> None:
        """Call `function`, but not in a forked child."""
        if self.is_own:
            function()
