# SPDX-License-Identifier: Apache-2.0
"""Which kernels may be loaded on several threads at once.

Triton makes a kernel's launcher an extension module, and all of them have one name. When such a
module is loaded again, for another kernel with arguments of the same types, Python puts it into the
module object of that name that was made last, whoever is still about to read that one: a
kernel would get another's launcher. Different launchers may be loaded at once, each for the first
time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

_CONSTANT = "constexpr"

_lock = threading.Lock()
_begun: set[tuple[str, ...]] = set()


def begin_launcher(signature: Mapping[Any, Any]) -> bool:
    """Whether nobody in this process has begun to load the launcher of a kernel with these types of
    arguments; from now on somebody has.

    Constants are no arguments of a launcher. Types that this takes for equal may differ: then a
    launcher is loaded later than it could be.
    """
    types = tuple(str(kind) for kind in signature.values() if kind != _CONSTANT)
    with _lock:
        first = types not in _begun
        _begun.add(types)
    return first
