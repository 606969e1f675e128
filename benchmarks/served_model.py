# SPDX-License-Identifier: Apache-2.0
"""A directory that can be served, from one that holds only the dimensions of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.token_source import train_tokenizer


def servable(model: Path, directory: Path) -> Path:
    """`model`, or a copy of its configuration in `directory` with a tokenizer if it has none."""
    if (model / "tokenizer.json").exists():
        return model
    shutil.copy(model / "config.json", directory)
    config = json.loads((model / "config.json").read_text())
    train_tokenizer(directory)
    pad_vocabulary(directory / "tokenizer.json", config.get("text_config", config)["vocab_size"])
    return directory


def pad_vocabulary(path: Path, size: int) -> None:
    """Give every id below `size` a text, so that whatever a model generates can be shown."""
    content = json.loads(path.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    # A special token keeps its id only if the vocabulary has it too.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    taken = set(vocabulary.values())
    vocabulary |= {f"w{i}": i for i in range(size) if i not in taken}
    path.write_text(json.dumps(content))
