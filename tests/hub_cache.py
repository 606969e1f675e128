# SPDX-License-Identifier: Apache-2.0
"""A cache of the hub with checkpoints of several revisions, for tests without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def serve_from_cache(
    patch: pytest.MonkeyPatch, root: Path, name: str, revisions: Mapping[str, Path]
) -> None:
    """Let the hub's clients find `name` at each of the `revisions`, directories, and nothing else.
    `main` is the one that is found without a revision."""
    hub = root / f"models--{name.replace('/', '--')}"
    (hub / "refs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    for index, (revision, directory) in enumerate(revisions.items()):
        commit = f"{index:040x}"
        (hub / "refs" / revision).write_text(commit)
        (hub / "snapshots" / commit).symlink_to(directory)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
