# SPDX-License-Identifier: Apache-2.0
"""The examples are scripts beside each other; their tests import them as such."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
