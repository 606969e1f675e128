# SPDX-License-Identifier: Apache-2.0
"""CPU speed against transformers' `generate`, in one run, on a random ~120M-parameter Qwen3.5.

    python benchmarks/cpu_vs_transformers.py --dtype bfloat16 --output cpu_bf16.json

Decode: a batch of 8 prompts of 32 tokens, `--tokens` new tokens, greedy. A step's time is
(time for N tokens - time for 1 token) / (N - 1), so prefill drops out on both sides. Prefill: one
prompt of 2,048 tokens (`--prefill`), one new token. The model has 16 layers (`--layers`). Both
engines use the same weights and thread count; their turns alternate and the median is kept. The
result names the instruction set of our kernels: the machine's best, or what VLLM_CPU_ISA narrows
them to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.kernels.cpu import CpuKernels

_VOCAB = 32_000


def make_checkpoint(path: Path, dtype: torch.dtype, layers: int) -> None:
    """Of four layers three are gated delta nets, the last is attention; hidden 640, tied
    embeddings."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=_VOCAB,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=layers,
        layer_types=[
            "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)
        ],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3_5ForCausalLM(config)
    model.to(dtype)  # type: ignore[arg-type]  # what wraps it hides its signature
    model.save_pretrained(path)


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def alternate(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[float]:
    """Median seconds of each, their turns interleaved after one warm-up each."""
    ours(), theirs()
    pairs = [(timed(ours), timed(theirs)) for _ in tqdm(range(rounds), unit="round", leave=False)]
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory), dtype, args.layers)
        llm = LLM(
            directory,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=False,
        )
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(10, _VOCAB, (8, 32), generator=generator)
    long = torch.randint(10, _VOCAB, (1, args.prefill), generator=generator)

    def ours(prompts: torch.Tensor, tokens: int) -> Callable[[], object]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=row) for row in prompts.tolist()]
        return lambda: llm.generate(inputs, params, use_tqdm=False)

    def theirs(prompts: torch.Tensor, tokens: int) -> Callable[[], object]:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

        def run() -> None:
            with torch.inference_mode():
                mask = torch.ones_like(prompts)
                reference.generate(prompts, attention_mask=mask, **options)

        return run

    def step_ms() -> list[float]:
        many = alternate(ours(batch, args.tokens), theirs(batch, args.tokens), args.rounds)
        one = alternate(ours(batch, 1), theirs(batch, 1), args.rounds)
        return [1e3 * (m - o) / (args.tokens - 1) for m, o in zip(many, one, strict=True)]

    decode = step_ms()
    prefill = [1e3 * s for s in alternate(ours(long, 1), theirs(long, 1), args.rounds)]
    result = {
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "instruction_set": CpuKernels().isa,
        "layers": args.layers,
        "decode_step_ms": {"ours": decode[0], "transformers": decode[1]},
        "decode_ratio": decode[1] / decode[0],
        "prefill_tokens": args.prefill,
        "prefill_ms": {"ours": prefill[0], "transformers": prefill[1]},
        "prefill_ratio": prefill[1] / prefill[0],
    }
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
