# SPDX-License-Identifier: Apache-2.0
"""Make what `vllm serve --capture-live` stored a dataset that speculators trains from.

    python examples/collect_capture.py /data/live

Adds the samples' text part, loss masks (1 on the model's tokens) and token counts beside the hidden
states. The server may go on meanwhile: the dataset ends where the directory did, and the same
command later takes what has come since.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafter_dataset import DrafterDataset, Settings
from safetensors import safe_open
from tqdm import tqdm
from training_text import Sample


def collect(path: Path) -> int:
    """Write the dataset; returns its samples. SystemExit where there is nothing to collect."""
    said = path / "capture.json"
    if not said.is_file():
        raise SystemExit(f"error: {path} has no capture.json; --capture-live makes it")
    capture = json.loads(said.read_text())
    dataset = DrafterDataset(path)
    text = (path / "samples.jsonl").read_text() if (path / "samples.jsonl").exists() else ""
    # A line that the server is just writing has no end.
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines:
        raise SystemExit(f"error: nothing was captured into {path} yet")
    longest = max(_length(dataset.file_of(index)) for index in range(len(lines)))
    settings = Settings(
        model=capture["model"],
        dtype=capture["dtype"],
        layers=capture["layers"],
        seq_length=longest,
        samples=len(lines),
        inputs=[],
    )
    dataset.prepare(settings, _samples(dataset, lines))
    return len(lines)


def _length(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        (length,) = file.get_slice("token_ids").get_shape()
    return int(length)


def _samples(dataset: DrafterDataset, lines: list[str]) -> Iterator[Sample]:
    for index, line in enumerate(tqdm(lines, desc="collecting", unit="sample", leave=False)):
        with safe_open(dataset.file_of(index), framework="pt") as file:
            token_ids = file.get_tensor("token_ids").tolist()
        num_prompt = json.loads(line)["num_prompt"]
        mask = [0] * num_prompt + [1] * (len(token_ids) - num_prompt)
        yield Sample(token_ids, mask)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="what --capture-live-path named")
    path = parser.parse_args(arguments).path
    try:
        print(f"{path}: {collect(path)} samples")
    except OSError as error:
        raise SystemExit(f"error: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
