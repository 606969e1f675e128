# SPDX-License-Identifier: Apache-2.0
"""Train the demo checkpoint: a small Qwen3.5-architecture hybrid on the Python standard library.

    python examples/train_demo_model.py --output examples/models/tiny-qwen3_5-code
    python examples/train_demo_model.py --supernet --output SUPERNET

With `--supernet` it is an Apriel2 supernet of four layers with four mixers each instead, whose 256
placements are trained together: `examples/placements.py` compares them.

Needs torch, transformers, matplotlib and a few minutes on one GPU. Data: the source and
docstrings of the Python installation that runs it, and this project's docs; nothing is downloaded.
One file in twenty is held out (by a hash of its path). A fifth of the training documents are chats
made from functions with docstrings, so that the chat template means something to the model.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from model_card import Sample, write_card, write_supernet_card
from python_library import is_held_out, library_files, library_root
from supernet_model import Sizes, Supernet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

_END, _START, _STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PROMPTS = (
    "def read_lines(path):",
    "class Stack:\n    def __init__(self):",
    "import os\nimport sys\n\ndef main(argv=None):",
    'def is_prime(n):\n    """Return True if n is prime.',
    "for i, line in enumerate(",
)


Model = Qwen3_5ForCausalLM | Supernet


@dataclass(frozen=True)
class Corpus:
    """Documents as text."""

    train: list[str]
    held_out: list[str]


def collect(repo: Path) -> Corpus:
    """Standard library (without its tests) and our docs, split by a hash of the path."""
    library = library_root()
    files = library_files()
    files += sorted((repo / "docs").rglob("*.md")) + sorted((repo / "vllm").rglob("*.py"))
    corpus = Corpus([], [])
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        held_out = is_held_out(path.relative_to(library if path.is_relative_to(library) else repo))
        (corpus.held_out if held_out else corpus.train).append(text)
        if not held_out and path.suffix == ".py":
            corpus.train.extend(_chats(text))
    return corpus


def _chats(source: str) -> Iterator[str]:
    """One chat for every second documented function: its summary asked for, its code answered."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    count, lines = 0, source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        summary = (ast.get_docstring(node) or "").strip().split("\n\n")[0].replace("\n", " ")
        code = _segment(lines, node)
        count += 1
        if not summary or len(code) > 3000 or count % 2:
            continue
        yield (
            f"{_START}user\nWrite a Python function {node.name}. {summary}{_STOP}\n"
            f"{_START}assistant\n{code}{_STOP}\n"
        )


def _segment(lines: list[str], node: ast.FunctionDef) -> str:
    """As `ast.get_source_segment`, which splits the whole source for each function."""
    part = lines[node.lineno - 1 : node.end_lineno]
    part[-1] = part[-1].encode()[: node.end_col_offset].decode()
    part[0] = part[0].encode()[node.col_offset :].decode()
    return "\n".join(part)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every byte sequence round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END, _START, _STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_STOP,
        pad_token=_END,
        additional_special_tokens=[_START],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def model_config(vocab_size: int, context: int) -> Qwen3_5TextConfig:
    """About 5.6 million parameters: six gated-delta-net and two full-attention layers."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=480,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=context,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All documents in one `[tokens]` int64 stream, separated by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(_END)
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(end)
    return torch.tensor(ids)


def reduced_precision(device: torch.device) -> torch.autocast:
    """bf16 where it is faster: on GPUs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.inference_mode()
def loss_on(model: Model, stream: Tensor, context: int, batches: int | None) -> float:
    """Mean next-token loss in nats over windows of `context` tokens."""
    windows = stream[: len(stream) // context * context].view(-1, context)
    losses = []
    for chunk in windows.split(16)[:batches]:
        with reduced_precision(chunk.device):
            losses.append(model(chunk, labels=chunk).loss.float())
    return torch.stack(losses).mean().item()


def perplexities(model: Supernet, stream: Tensor, context: int) -> dict[str, float]:
    """Of the uniform placements, and of mixtures of two mixers."""
    count, own = model.sizes.layers, model.placement
    chosen = {f"all-{name}": [name] * count for name in model.names}
    for name in model.names[1:]:
        chosen[f"every2nd-{name}"] = [("attention", name)[i % 2] for i in range(count)]
    found = {}
    for short, placement in chosen.items():
        model.placement = placement
        found[short] = round(math.exp(loss_on(model, stream, context, None)), 4)
    model.placement = own
    return found


def train(
    model: Model, train_ids: Tensor, held_out: Tensor, args: argparse.Namespace
) -> list[tuple[int, float, float | None]]:
    """AdamW, linear warm-up and cosine decay; returns (step, training loss, held-out loss)."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
    )
    warm_up = max(1, args.steps // 20)

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, args.steps - warm_up)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(args.seed)
    history: list[tuple[int, float, float | None]] = []
    deadline = time.monotonic() + args.minutes * 60
    progress = tqdm(range(args.steps), desc="training", unit="step")
    for step in progress:
        starts = torch.randint(len(train_ids) - args.context, (args.batch,), generator=generator)
        batch = torch.stack([train_ids[s : s + args.context] for s in starts.tolist()])
        with reduced_precision(batch.device):
            loss = model(batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        last = step + 1 == args.steps
        if step % 20 == 0 or last:
            scored = loss_on(model, held_out, args.context, 8) if step % 100 == 0 or last else None
            history.append((step, loss.item(), scored))
            progress.set_postfix(loss=f"{history[-1][1]:.3f}")
        if time.monotonic() > deadline:
            raise SystemExit(
                f"error: {args.minutes} minutes passed after {step + 1} of {args.steps} steps; "
                "lower --steps so that the learning rate can decay"
            )
    return history


def plot(history: list[tuple[int, float, float | None]], path: Path) -> None:
    """Training and held-out loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([h[0] for h in history], [h[1] for h in history], label="training", alpha=0.7)
    scored = [(step, value) for step, _, value in history if value is not None]
    axes.plot([s for s, _ in scored], [v for _, v in scored], "o-", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@torch.inference_mode()
def draw_samples(
    model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[Sample]:
    """Greedy and sampled continuations of fixed prompts, unedited."""
    samples = []
    for prompt in _PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        texts = []
        for sampled in (False, True):
            torch.manual_seed(seed)
            options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if sampled else {}
            out = model.generate(ids, max_new_tokens=96, pad_token_id=0, **options)
            texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        samples.append(Sample(prompt, *texts))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--context", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--minutes", type=float, default=15, help="give up after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--supernet", action="store_true", help="train an Apriel2 supernet")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the supernet")
    args = parser.parse_args()
    if args.hidden_size != 256 and not args.supernet:
        parser.error("--hidden-size: give it with --supernet")
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    corpus = collect(Path(__file__).resolve().parent.parent)
    tokenizer = train_tokenizer(corpus.train, args.vocab_size)
    train_ids = pack(corpus.train, tokenizer).to(device)
    held_out = pack(corpus.held_out, tokenizer).to(device)
    print(f"{len(train_ids):,} training tokens, {len(held_out):,} held out")
    model: Model
    if args.supernet:
        sizes = Sizes(len(tokenizer), args.context, args.hidden_size, 2 * args.hidden_size)
        model = Supernet(sizes, args.seed).to(device)
        model.silence_blocks()
    else:
        model = Qwen3_5ForCausalLM(model_config(len(tokenizer), args.context)).to(device)
    history = train(model, train_ids, held_out, args)
    model = model.eval().to(torch.bfloat16)
    perplexity = math.exp(loss_on(model, held_out, args.context, None))
    args.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    plot(history, args.output / "loss.png")
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": len(train_ids),
        "held_out_tokens": len(held_out),
        "held_out_perplexity": round(perplexity, 4),
        "steps": args.steps,
        "tokens_per_step": args.batch * args.context,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "one CPU core",
    }
    (args.output / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    if isinstance(model, Supernet):
        facts["placement"] = ",".join(model.placement)
        facts["layers"], facts["context"] = model.sizes.layers, args.context
        names = ("hidden_size", "vocab_size", "context", "batch", "steps", "learning_rate")
        flags = {name.replace("_", "-"): getattr(args, name) for name in names}
        facts["flags"] = " ".join(f"--{name} {value}" for name, value in flags.items())
        facts["perplexities"] = perplexities(model, held_out, args.context)
        (args.output / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
        write_supernet_card(args.output / "README.md", facts)
    else:
        write_card(args.output / "README.md", facts, draw_samples(model, tokenizer, args.seed))
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
