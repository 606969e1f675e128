# SPDX-License-Identifier: Apache-2.0
"""`LLM.beam_search` against transformers' beam search: the same beams, order and scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity_checks import LAYOUT_SETTINGS, MULTIPROCESSING
from tiny_models import (
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    hf_model,
    hf_reference_generate,
    tiny_model,
)

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

pytestmark = pytest.mark.parity

PROMPTS = [[5, 6, 7, 8] * 5, [100, 3, 9], list(range(50))]


@dataclass(frozen=True)
class Pair:
    """Both sides, and the ends of sequence: these models never say their own, so two they do."""

    llm: LLM
    reference: Any
    ends: list[int]

    def generated(self, tokens: list[int], prompt: list[int]) -> list[int]:
        """Up to the first end; transformers pads after it."""
        tokens = tokens[len(prompt) :]
        cut = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[:cut]


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", MULTIPROCESSING)
        path = tiny_model(request.param)
        said = [hf_reference_generate(path, prompt, 8)[-1] for prompt in PROMPTS[:2]]
        ends = [EOS_TOKEN_ID, *said]
        llm = LLM(
            str(path),
            dtype="float32",
            max_model_len=128,
            kv_cache_memory_bytes=32 << 20,
            override_generation_config={"eos_token_id": ends},
            **LAYOUT_SETTINGS,
        )
        yield Pair(llm, hf_model(path), ends)
        llm.shutdown()


@pytest.mark.parametrize(
    ("width", "penalty", "length"),
    [(2, 1.0, 10), (4, 1.0, 20), (4, 0.0, 12), (3, 2.0, 15), (4, -1.0, 12)],
)
def test_beams_equal_transformers(pair: Pair, width: int, penalty: float, length: int) -> None:
    params = BeamSearchParams(
        width, length, length_penalty=penalty, include_stop_str_in_output=True
    )
    outputs = pair.llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = pair.reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=length,
            length_penalty=penalty,
            early_stopping="never",
            do_sample=False,
            eos_token_id=pair.ends,
            pad_token_id=PAD_TOKEN_ID,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ours = [pair.generated(s.tokens, prompt) for s in output.sequences]
        assert ours == [pair.generated(row.tolist(), prompt) for row in expected.sequences]
        scores = [
            s.cum_logprob / len(tokens) ** penalty
            for s, tokens in zip(output.sequences, ours, strict=True)
        ]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)


def test_both_kinds_of_end_occur(pair: Pair) -> None:
    """Otherwise the comparison above would say little."""
    outputs = pair.llm.beam_search(PROMPTS, BeamSearchParams(4, 20))
    sequences = [sequence for output in outputs for sequence in output.sequences]
    assert {s.finish_reason for s in sequences} == {"stop", "length"}
    assert {s.stop_reason for s in sequences} & set(pair.ends)


def test_one_beam_is_greedy_and_text_has_the_prompt(pair: Pair) -> None:
    (output,) = pair.llm.beam_search("hello", BeamSearchParams(1, 6, ignore_eos=True))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (expected,) = pair.llm.generate("hello", greedy)
    assert output.sequences[0].tokens[5:] == list(expected.outputs[0].token_ids)
    text = output.sequences[0].text
    assert text is not None and text.startswith("hello" + expected.outputs[0].text)


def test_the_context_ends_a_search_and_too_wide_a_beam_is_refused(pair: Pair) -> None:
    llm = pair.llm
    (output,) = llm.beam_search([[7] * 125], BeamSearchParams(2, 50, ignore_eos=True))
    assert {len(s.tokens) for s in output.sequences} == {128}
    with pytest.raises(ValueError, match=r"beam_width 6 needs the 24 likeliest.*max_logprobs"):
        llm.beam_search([[7]], BeamSearchParams(6, 5))
    with pytest.raises(ValueError, match="concurrency_limit"):
        llm.beam_search([[7]], BeamSearchParams(2, 5), concurrency_limit=0)


def test_concurrency_limit_changes_nothing(pair: Pair) -> None:
    llm, params = pair.llm, BeamSearchParams(3, 8)
    bars: list[Any] = []
    everything = llm.beam_search(PROMPTS, params)
    one_by_one = llm.beam_search(PROMPTS, params, use_tqdm=bar_into(bars), concurrency_limit=1)
    assert [[s.tokens for s in o.sequences] for o in everything] == [
        [s.tokens for s in o.sequences] for o in one_by_one
    ]
    assert bars[0].n == len(PROMPTS)


def bar_into(bars: list[Any]) -> Any:
    from tqdm import tqdm

    def make(**options: Any) -> Any:
        bars.append(tqdm(**options))
        return bars[-1]

    return make
