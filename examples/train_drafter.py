# SPDX-License-Identifier: Apache-2.0
"""`make drafter`: from a model to a drafter that serves it, offline and without GPU.

    python examples/train_drafter.py --output /data/loop

1. The model continues pieces of text; its hidden states become a dataset.
2. speculators trains an EAGLE-3 drafter on it.
3. `vllm bench acceptance` predicts how many of its drafts are accepted, for texts that neither was
   trained on.
4. `vllm serve` drafts with it for the same texts, and its metrics say how many were accepted at
   each position.

    OUTPUT/data, OUTPUT/held_out   datasets, see docs/extraction.md
    OUTPUT/drafter                 the checkpoint, for `--speculative-config '{"model": ...}'`
    OUTPUT/acceptance.json         what was predicted and measured
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drafter_serving import Measured, measure
from extract_hidden_states import choose_layers
from own_outputs import Speech, Wanted, make_datasets
from transformers import AutoConfig

from vllm.benchmarks.acceptance import AcceptanceArgs, predict

_DEMO_MODEL = Path(__file__).resolve().parent / "models" / "tiny-qwen3_5-code"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs", nargs="*", type=Path, help="Python files (default: the standard library)"
    )
    parser.add_argument("--output", type=Path, required=True, help="a directory that is not there")
    parser.add_argument("--model", default=str(_DEMO_MODEL), help="local checkpoint of the target")
    parser.add_argument("--samples", type=int, default=480, help="to train on")
    parser.add_argument("--held-out", type=int, default=24, help="samples to measure with")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of text in each sample")
    parser.add_argument("--output-tokens", type=int, default=192, help="of the model in each")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        help="as of extract_hidden_states.py (default: 0, half, the one before the last, the last)",
    )
    parser.add_argument("--depth", type=int, default=3, help="drafts in a row to train")
    parser.add_argument("--drafts", type=int, default=5, help="per step, when it serves")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-bytes", type=int, default=256 << 20, help="of the engines' state")
    args = parser.parse_args(arguments)
    if args.output.exists() and any(args.output.iterdir()):
        parser.error(f"--output {args.output} is not empty")
    if args.batch_tokens < args.prompt_tokens + args.output_tokens - 1:
        parser.error("--batch-tokens must hold a sample")
    if args.samples < 10:
        parser.error("--samples must be at least 10: one in ten validates")
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: no checkpoint is there")
    return args


def input_layers(model: str) -> list[int]:
    """The embeddings, by which a drafter finds where it has seen a token before; half of the
    layers; all but one; and all of them, which is what it learns to predict."""
    count = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    return sorted({0, count // 2, count - 1, count})


def extract(args: argparse.Namespace, data: Path, held_out: Path) -> list[int]:
    """Make both datasets; returns the layers that they state."""
    layers = choose_layers(args.model, args.layers or input_layers(args.model))
    speech = Speech(
        model=args.model,
        layers=layers,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        inputs=args.inputs,
        memory_bytes=args.memory_bytes,
    )
    make_datasets(
        speech,
        [
            Wanted(data, args.samples, held_out=False, learn_prompts=True),
            Wanted(held_out, args.held_out, held_out=True, learn_prompts=False),
        ],
    )
    return layers


def run(args: argparse.Namespace) -> Measured:
    """All four steps; returns what serving measured."""
    # An import of many seconds, which wrong arguments need not wait for.
    from drafter_training import Recipe, train

    data, held_out, drafter = (args.output / name for name in ("data", "held_out", "drafter"))
    started = time.monotonic()
    print("--- 1. hidden states", flush=True)
    layers = extract(args, data, held_out)
    print(f"--- 2. training, after {time.monotonic() - started:.0f} s", flush=True)
    recipe = Recipe(
        model=args.model,
        depth=args.depth,
        drafts=args.drafts,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        batch_tokens=args.batch_tokens,
        seed=args.seed,
    )
    train(data, args.output / "checkpoints", drafter, recipe)
    shutil.rmtree(args.output / "checkpoints")
    print(f"--- 3. prediction, after {time.monotonic() - started:.0f} s", flush=True)
    dataset = str(held_out)
    predicted = predict(AcceptanceArgs(model=args.model, drafter=str(drafter), dataset=dataset))
    print(f"acceptance length {predicted.length:.2f} over {predicted.drafts:,} rounds")
    print(f"--- 4. serving, after {time.monotonic() - started:.0f} s", flush=True)
    measured = measure(args.model, drafter, held_out, args.output_tokens, args.memory_bytes)
    result = {"layers": layers, "seconds": round(time.monotonic() - started, 1)}
    saved = {**result, "predicted_length": predicted.length, **measured.as_dict()}
    (args.output / "acceptance.json").write_text(json.dumps(saved, indent=1) + "\n")
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    print(run(parse_arguments(arguments)).table())
    return 0


if __name__ == "__main__":
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.getLogger("vllm").setLevel(level.upper())
    sys.exit(main())
