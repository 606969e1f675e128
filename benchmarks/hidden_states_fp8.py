# SPDX-License-Identifier: Apache-2.0
"""The error of hidden states that are stored in eight bits; docs/extraction.md has the table.

    python -m benchmarks.hidden_states_fp8 --model examples/models/tiny-qwen3_5-code

Extracts the same texts twice, with `storage_dtype` `auto` and `fp8_e4m3`, and compares what
`load_hidden_states` gives back. A row is what one layer keeps of one token.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.offline import extraction_settings

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RowErrors:
    """Of one layer's rows. `rms` and `max_norm`: the norm of a row's error over the row's norm, its
    root mean square and its maximum over rows; `max_element`: the largest error of an element over
    the largest element of its row."""

    rms: float
    max_norm: float
    max_element: float

    @classmethod
    def of(cls, exact: Tensor, restored: Tensor) -> RowErrors:
        """`exact`, `restored`: `[rows, hidden]`."""
        exact = exact.double()
        error = restored.double() - exact
        relative = error.norm(dim=-1) / exact.norm(dim=-1)
        largest = error.abs().amax(-1) / exact.abs().amax(-1)
        return cls(
            relative.square().mean().sqrt().item(), relative.max().item(), largest.max().item()
        )


def extract(
    model: str, layers: list[int], storage: str, prompts: list[list[int]], **options: Any
) -> list[Tensor]:
    """Each prompt's rows `[tokens, layers, hidden]`, as a reader of the files gets them."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        load_hidden_states,
    )

    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(
            model,
            enable_prefix_caching=False,
            **extraction_settings(layers, directory, storage_dtype=storage),
            **options,
        )
        try:
            outputs = llm.generate(
                [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                SamplingParams(max_tokens=1, temperature=0, detokenize=False),
                use_tqdm=False,
            )
            replies = [output.kv_transfer_params or {} for output in outputs]
            files = [load_hidden_states(reply["hidden_states_path"]) for reply in replies]
            return [file["hidden_states"] for file in files]
        finally:
            llm.llm_engine.shutdown()


def measure(
    model: str, layers: list[int], prompts: list[list[int]], **options: Any
) -> dict[int, RowErrors]:
    """The errors of each layer's rows."""
    exact, restored = (
        torch.cat(extract(model, layers, storage, prompts, **options))
        for storage in ("auto", "fp8_e4m3")
    )
    return {k: RowErrors.of(exact[:, i], restored[:, i]) for i, k in enumerate(layers)}


def main(arguments: Sequence[str] | None = None) -> None:
    from transformers import AutoConfig, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=512, help="of each text, at most")
    args = parser.parse_args(arguments)
    count = AutoConfig.from_pretrained(args.model).get_text_config().num_hidden_layers
    layers = sorted({0, 2, count // 2, count - 3, count} & set(range(count + 1)))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [path.read_text() for path in sorted((_ROOT / "vllm" / "config").glob("*.py"))]
    prompts = [tokenizer(text).input_ids[: args.tokens] for text in texts]
    prompts = [ids for ids in prompts if len(ids) > 1]
    errors = measure(args.model, layers, prompts, max_model_len=args.tokens + 1)
    print(f"{sum(map(len, prompts))} tokens of {len(prompts)} files in vllm/config\n")
    print("| Layer id | rms | largest | largest of an element |\n|---|---|---|---|")
    for layer, found in errors.items():
        values = (found.rms, found.max_norm, found.max_element)
        print(f"| {layer} | {' | '.join(f'{100 * value:.2f} %' for value in values)} |")


if __name__ == "__main__":
    main()
