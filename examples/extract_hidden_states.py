# SPDX-License-Identifier: Apache-2.0
"""Make a drafter-training dataset: text, and the hidden states of a model for every token of it.

    python examples/extract_hidden_states.py --output /data/drafter
    python examples/extract_hidden_states.py --output /data/drafter --verify

speculators trains from the result as it is (`--data-path /data/drafter`). Stopped at any point,
the same command continues where it stopped. Without --server the engine runs in this program;
with it, a server that was started with extraction does the work (docs/extraction.md says how),
and its files must be reachable under the same path from here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from extraction_engines import Extract, local_engine, remote_engine
from tqdm import tqdm
from training_text import find_files, read_samples
from transformers import AutoConfig, AutoTokenizer

from vllm.distributed.kv_transfer.kv_connector.v1.prefix_identity import tail_digest
from vllm.exceptions import VLLMValidationError

try:
    from drafter_dataset import DrafterDataset, Settings
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; pip install datasets") from error

_DEMO_MODEL = Path(__file__).resolve().parent / "models" / "tiny-qwen3_5-code"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        help="text, Python, Markdown or JSONL files, or directories of them; a line of JSONL has "
        '"text", or "input_ids" and optionally "loss_mask" (default: the Python standard library)',
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the dataset")
    parser.add_argument("--verify", action="store_true", help="only check an existing dataset")
    parser.add_argument(
        "--model", default=str(_DEMO_MODEL), help="checkpoint (default: the demo's)"
    )
    parser.add_argument("--server", help="URL of a running server instead of an engine in here")
    parser.add_argument("--samples", type=int, default=200, help="at most (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens per sample, at most")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        help="ids of the layers to store, ascending; the last one is the model's number of layers "
        "(default: 2, half, three before the last, and the last); with --server, which chooses, "
        "what it stores: training a drafter needs to know",
    )
    parser.add_argument("--dtype", help="of the engine (default: the checkpoint's)")
    parser.add_argument("--in-flight", type=int, default=32, help="requests at a time")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=int, help="of the engine (default: its own)"
    )
    args = parser.parse_args(arguments)
    if min(args.samples, args.seq_length, args.in_flight) < 1:
        parser.error("--samples, --seq-length and --in-flight must be at least 1")
    if args.server and (args.dtype or args.kv_cache_memory_bytes):
        parser.error("--dtype and --kv-cache-memory-bytes are flags of the server then")
    return args


def choose_layers(model: str, wanted: list[int] | None) -> list[int]:
    """The ids to store, checked against the model."""
    count = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    if wanted is None:
        return sorted({i for i in (2, count // 2, count - 3) if 0 <= i < count}) + [count]
    if wanted != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] != count:
        raise SystemExit(
            f"error: --layers {wanted} must ascend, without repeats, from 0 or more to {count}, "
            f"the number of layers of {model}: trainers take the last one as the model's output"
        )
    return wanted


def settings_of(args: argparse.Namespace) -> Settings:
    unknown = args.server and args.layers is None
    return Settings(
        model=args.model,
        dtype="server" if args.server else args.dtype or "auto",
        layers=None if unknown else choose_layers(args.model, args.layers),
        seq_length=args.seq_length,
        samples=args.samples,
        inputs=[str(path.resolve()) for path in args.inputs],
        weights=None if args.server else weights_digest(Path(args.model)),
    )


def weights_digest(model: Path) -> str | None:
    """Of a checkpoint that lies in a directory: its files may be others when a run is continued."""
    files = [tail_digest(path) for path in sorted(model.glob("*.safetensors"))]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16] if files else None


def prepare(dataset: DrafterDataset, settings: Settings, inputs: list[Path]) -> None:
    """Write the dataset's text part, or check that what is there belongs to the same settings.

    Text without any rows yet is written anew: what was wrong with it may have been put right.
    """
    if dataset.is_prepared and dataset.has_rows:
        dataset.check_settings(settings)
        return
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    files = tqdm(find_files(inputs), desc="reading", unit="file", leave=False)
    vocab_size = AutoConfig.from_pretrained(settings.model).get_text_config().vocab_size
    samples = read_samples(files, tokenizer, settings.seq_length, settings.samples, vocab_size)
    dataset.prepare(settings, samples)


def engine_for(
    args: argparse.Namespace, settings: Settings, staging: Path
) -> AbstractContextManager[Extract]:
    if args.server:
        return remote_engine(args.server, args.in_flight)
    assert settings.layers is not None
    return local_engine(
        settings.model,
        settings.layers,
        staging,
        dtype=settings.dtype,
        # One more for the token that every request generates.
        max_model_len=settings.seq_length + 1,
        max_num_seqs=args.in_flight,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )


def extract_missing(
    dataset: DrafterDataset, pending: list[int], extract: Extract, batch: int
) -> int:
    """Run the samples in `pending` through the engine, `batch` at a time; returns their tokens."""
    tokens = 0
    total = len(dataset)
    with tqdm(total=total, initial=total - len(pending), desc="extracting", unit="sample") as bar:
        for start in range(0, len(pending), batch):
            indices = pending[start : start + batch]
            token_ids = [dataset.token_ids(index) for index in indices]
            for index, path in zip(indices, extract(token_ids), strict=True):
                dataset.adopt(index, path)
                bar.update()
            tokens += sum(map(len, token_ids))
    return tokens


def produce(args: argparse.Namespace) -> int:
    """Extract whatever the dataset lacks; returns the exit status."""
    dataset = DrafterDataset(args.output)
    settings = settings_of(args)
    with dataset.writing():
        prepare(dataset, settings, args.inputs)
        pending = [i for i in range(len(dataset)) if not dataset.is_finished(i)]
        print(f"{dataset.path}: {len(dataset) - len(pending)} of {len(dataset)} samples are there")
        if not pending:
            return 0
        with engine_for(args, settings, dataset.staging) as extract:
            started = time.monotonic()
            tokens = extract_missing(dataset, pending, extract, 2 * args.in_flight)
            seconds = time.monotonic() - started
    print(
        f"{len(pending)} samples, {tokens:,} tokens in {seconds:.1f} s: "
        f"{len(pending) / seconds:.1f} samples/s, {tokens / seconds:,.0f} tokens/s"
    )
    return 0


def with_progress(dataset: DrafterDataset) -> Iterator[tuple[int, str | None]]:
    return iter(tqdm(dataset.problems(), desc="checking", total=len(dataset), leave=False))


def verify(path: Path) -> int:
    """Check every file of a dataset; prints one line, and one per bad sample; exit status."""
    dataset = DrafterDataset(path)
    bad = {index: problem for index, problem in with_progress(dataset) if problem}
    for index, problem in bad.items():
        print(f"{dataset.file_of(index)}: {problem}", file=sys.stderr)
    size = sum(file.stat().st_size for file in (path / "hidden_states").glob("hs_*.safetensors"))
    print(
        f"{path}: {len(dataset) - len(bad)} of {len(dataset)} samples are good, "
        f"{len(bad)} bad or missing, {size / 1e6:,.1f} MB"
    )
    return 1 if bad else 0


def keep_the_terminal_for_progress() -> None:
    """Only the engine's warnings, from this process and its own, unless told otherwise."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.getLogger("vllm").setLevel(level.upper())


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        return verify(args.output) if args.verify else produce(args)
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        return 130
    except (OSError, VLLMValidationError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    keep_the_terminal_for_progress()
    sys.exit(main())
