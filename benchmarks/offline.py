# SPDX-License-Identifier: Apache-2.0
"""The offline workloads of docs/performance.md, on any package that offers `vllm.LLM`.

    python -m benchmarks.offline serve   docs/measurements/h200_serve.json
    python -m benchmarks.offline extract docs/measurements/h200_extract.json

Random weights on the dimensions of a 4B Qwen3.5; fixed output lengths, greedy. Further words
`key=value` (JSON values) are passed to `LLM(...)`. Needs one GPU of at least 40 GiB.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

_MODEL = Path(__file__).parent / "qwen3_5_4b"
_HIDDEN_DIR = "/dev/shm/hidden_states"
_NUM_FILES = 524


def default_settings() -> dict[str, Any]:
    """What the workloads pass to `LLM(...)`."""
    return {
        "model": str(_MODEL),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 16384,
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "language_model_only": True,
    }


def parse_settings(words: list[str]) -> dict[str, Any]:
    """`key=value` words with JSON values."""
    return {key: json.loads(value) for key, _, value in (word.partition("=") for word in words)}


def random_prompts(
    source: random.Random, count: int, low: int, high: int | None = None
) -> list[dict[str, Any]]:
    """`count` prompts of `low` (to `high`) random tokens."""
    lengths = [low if high is None else source.randint(low, high) for _ in range(count)]
    return [
        {"prompt_token_ids": [source.randrange(10, 240_000) for _ in range(n)]} for n in lengths
    ]


def extraction_settings(layers: list[int], directory: str, **connector: str) -> dict[str, Any]:
    """Captures `layers`; files go to `directory`. `connector`: further settings of it."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": directory, **connector},
        },
    }


class Bench:
    """One engine and the results so far, saved after every workload."""

    def __init__(self, mode: str, output: Path, settings: dict[str, Any]) -> None:
        self.output = output
        self.result: dict[str, Any] = {"mode": mode, "model": Path(settings["model"]).name}
        self.random = random.Random(0)
        started = time.perf_counter()
        from vllm import LLM, SamplingParams

        self.params_class = SamplingParams
        self.result["import_s"] = time.perf_counter() - started
        started = time.perf_counter()
        self.llm = LLM(**settings)
        self.result["init_s"] = time.perf_counter() - started

    def prompts(self, count: int, low: int, high: int | None = None) -> list[dict[str, Any]]:
        """See `random_prompts`."""
        return random_prompts(self.random, count, low, high)

    def sampling(self, tokens: int) -> Any:
        """Exactly `tokens` greedy tokens."""
        return self.params_class(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )

    def run(self, name: str, batch: list[Any], params: Any) -> None:
        started = time.perf_counter()
        outputs = self.llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens_in = sum(len(prompt["prompt_token_ids"]) for prompt in batch)
        tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
        self.result[name] = {
            "s": seconds,
            "in_tok": tokens_in,
            "out_tok": tokens_out,
            "in_per_s": tokens_in / seconds,
            "out_per_s": tokens_out / seconds,
        }
        print(name, self.result[name], flush=True)
        self.save()

    def save(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.result, indent=1) + "\n")


def serve(bench: Bench) -> None:
    """Decode at three batch sizes, prefill, a mixed load and long prompts."""
    for i in range(2):
        bench.run(f"bs1_128_256_{i}", bench.prompts(1, 128), bench.sampling(256))
    bench.run("bs8_128_256", bench.prompts(8, 128), bench.sampling(256))
    for i in range(2):
        bench.run(f"bs256_128_256_{i}", bench.prompts(256, 128), bench.sampling(256))
    for i in range(2):
        bench.run(f"prefill_64x4096_{i}", bench.prompts(64, 4096), bench.sampling(1))
    batch = bench.prompts(512, 256, 2048)
    lengths = [bench.random.randrange(64, 513) for _ in batch]
    bench.run("mixed_512", batch, [bench.sampling(n) for n in lengths])
    bench.run("long_32x12000_64", bench.prompts(32, 12_000), bench.sampling(64))


def extract(bench: Bench) -> None:
    """Prefill with capture; the files must all be there within a minute."""
    bench.run("warm_2048", bench.prompts(4, 2048), bench.sampling(1))
    for i in range(2):
        bench.run(f"extract_256x2048_{i}", bench.prompts(256, 2048), bench.sampling(1))
    deadline = time.monotonic() + 60
    files: list[str] = []
    while len(files) < _NUM_FILES:
        if time.monotonic() > deadline:
            raise SystemExit(f"error: {len(files)} of {_NUM_FILES} files after a minute")
        time.sleep(0.2)
        files = glob.glob(os.path.join(_HIDDEN_DIR, "*.safetensors"))
    bench.result["files"] = len(files)
    bench.result["bytes"] = sum(os.path.getsize(file) for file in files)
    bench.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["serve", "extract"])
    parser.add_argument("output", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    settings = default_settings()
    if args.mode == "extract":
        os.makedirs(_HIDDEN_DIR, exist_ok=True)
        settings |= extraction_settings([2, 16, 29, 32], _HIDDEN_DIR)
    settings |= parse_settings(args.settings)
    bench = Bench(args.mode, args.output, settings)
    bench.run("warm", bench.prompts(8, 512), bench.sampling(16))
    (serve if args.mode == "serve" else extract)(bench)


if __name__ == "__main__":
    # `kernels.py` beside this script is not the package of that name that transformers looks for.
    sys.path.pop(0)
    main()
