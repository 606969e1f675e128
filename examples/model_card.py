# SPDX-License-Identifier: Apache-2.0
"""Model cards of the checkpoints in `examples/models`, written by their training runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it, unedited."""

    prompt: str
    greedy: str
    sampled: str


_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# tiny-qwen3_5-code

A small hybrid language model in the architecture of Qwen3.5 (six gated-delta-net layers, two full
attention layers, {parameters:,} parameters, context 2,048), so that this project's demo and tests
run on something real. It completes Python in shape; it is not useful for anything else.

- **Data**: the Python {python} standard library's source without its tests, and this project's docs
  and source: {training_tokens:,} tokens, one file in twenty held out ({held_out_tokens:,} tokens).
  A part of the documents are chats made from documented functions.
- **Licence**: the weights are under Apache-2.0, as this project. The training text is the Python
  standard library (PSF licence) and this project; none of it is shipped here.
- **Training**: {steps:,} steps of {tokens_per_step:,} tokens, {minutes} minutes on one {device},
  torch {torch}:
  `python examples/train_demo_model.py --output examples/models/tiny-qwen3_5-code`
- **Held-out perplexity**: {held_out_perplexity} per token (bf16 weights).

![loss](loss.png)

## Samples

Unedited. Sampled: temperature 0.7, top-p 0.9, seed 0.
"""


def write_card(path: Path, facts: dict[str, object], samples: list[Sample]) -> None:
    """Write the card to `path`; `facts` are the numbers of the run."""
    parts = [_CARD.format(**facts)]
    for number, sample in enumerate(samples, 1):
        parts.append(f"\n### {number}\n")
        for title, text in (
            ("Prompt", sample.prompt),
            ("Greedy", sample.greedy),
            ("Sampled", sample.sampled),
        ):
            parts.append(f"\n{title}:\n\n````python\n{text}\n````\n")
    path.write_text("".join(parts), encoding="utf-8")


_SUPERNET_CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# tiny-apriel2-supernet

An Apriel2 supernet in miniature: {layers} layers with four token mixers each, {parameters:,}
parameters, context {context}. A training step drew the mixer of each layer, so that each of its 256
placements is a model. Its docs and tests compare them; it is not useful for anything else.

- **Data**: the Python {python} standard library's source without its tests, and this project's docs
  and source: {training_tokens:,} tokens, one file in twenty held out ({held_out_tokens:,} tokens).
- **Licence**: the weights are under Apache-2.0, as this project. The training text is the Python
  standard library (PSF licence) and this project; none of it is shipped here.
- **Training**: {steps:,} steps of {tokens_per_step:,} tokens, {minutes} minutes on {device}, torch
  {torch}:
  `python examples/train_demo_model.py --supernet --output MODEL {flags}`

![loss](loss.png)

Perplexity of held-out text per token, with weights in bf16:

| placement | |
|---|---|
"""


def write_supernet_card(path: Path, facts: dict[str, Any]) -> None:
    """The same for a supernet; `perplexities` are by placement."""
    rows = [f"| `{name}` | {value:.2f} |\n" for name, value in facts["perplexities"].items()]
    path.write_text(_SUPERNET_CARD.format(**facts) + "".join(rows), encoding="utf-8")
