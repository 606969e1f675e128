# SPDX-License-Identifier: Apache-2.0
"""docs/models.md lists every architecture that is served, and no other."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT
from vllm.model_executor.models.registry import _MODELS

#: serves no tokens
NOT_A_MODEL = {"ExtractHiddenStatesModel"}


def test_its_table_is_the_registry() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|", text, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert set(listed) == _MODELS.keys() - NOT_A_MODEL, (
        "give the architecture a row in the first table of docs/models.md"
    )
