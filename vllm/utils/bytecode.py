# SPDX-License-Identifier: Apache-2.0
"""Whether Python compiles modules anew at every start."""

from __future__ import annotations

import os
import sys


def missing_bytecode(package: str = "torch") -> str | None:
    """Why an imported package has no compiled files on disk, or None: it has, or is not imported.

    Compiling torch and transformers takes longer than everything else that importing them does.
    """
    module = sys.modules.get(package)
    spec = None if module is None else module.__spec__
    if spec is None or spec.cached is None or os.path.exists(spec.cached):
        return None
    if sys.dont_write_bytecode:
        return "PYTHONDONTWRITEBYTECODE is set"
    return f"{os.path.dirname(spec.cached)} cannot be written"
