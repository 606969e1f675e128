# SPDX-License-Identifier: Apache-2.0
"""Tokens sampled beside each drafter have the model's distribution: a chi-square test of whole
engines, whose model is a Markov chain.

Its layers add nothing to the embedding of the newest token, so the distribution of the next one is
known; the drafters' layers are as random as ever. `tests/v1/spec_decode/test_law.py` tests the
verification alone. `VLLM_TEST_LAW_TOKENS` replaces the tokens of every night; of two ranks that
share the vocabulary some are drawn in every run of the tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import Block, dflash_tensors, write_dflash
from draft_models import Shape, eagle3_tensors, gen, mtp_tensors, with_mtp, write_eagle3
from parity_checks import MakeEngine, in_this_process, on_cpus
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor

from tests.chi_square import BOUND, deviation
from tests.nightly import nightly
from vllm import SamplingParams, TokensPrompt
from vllm.kernels.sampling import naive
from vllm.kernels.step import AcceptProblem, accept
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.worker import step_inputs

pytestmark = [pytest.mark.slow, pytest.mark.parity, pytest.mark.timeout(1800), in_this_process]

VOCAB, LENGTH, ROWS, DRAFTS = 8, 125, 256, 3
NUM_TOKENS = int(os.environ.get("VLLM_TEST_LAW_TOKENS", "1000000"))
SHAPE = Shape(intermediate=96, head_dim=32, vocab=VOCAB, draft_vocab=VOCAB // 2)
#: of two ranks, in one batch: noise of the wrong rank deviates ten times as much as `BOUND`
FEW: dict[str, Any] = {"num_tokens": 10_000, "length": 40, "ranks": 2}
METHODS = ("none", "ngram", "mtp", "eagle3", "dflash", "dspark", "draft_model")


@lru_cache(1)
def chain(root: Path) -> Path:
    """A hybrid with a head of its own."""
    ends = {"eos_token_id": 2, "pad_token_id": 3}
    path = make_tiny("qwen3_5", root / "plain", vocab_size=VOCAB, **ends)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensor.zero_()
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor.copy_(gen(name, tensor.shape, 1.0 if "embed" in name else 0.25))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return with_mtp(path, root / "chain", mtp_tensors(SHAPE))


def logits_of(model: Path) -> Tensor:
    """`[vocab, vocab]`: of the token after each."""
    tensors = load_file(model / "model.safetensors")
    (embedding,) = (t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
    (norm,) = (t for name, t in tensors.items() if name.endswith("model.norm.weight"))
    x = embedding.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + norm.double())
    return x @ tensors["lm_head.weight"].double().T


def settings_of(method: str, target: Path, root: Path) -> dict[str, Any] | None:
    if method == "none":
        return None
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "ngram":
        settings |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    elif method == "eagle3":
        tensors = eagle3_tensors(SHAPE, {})
        settings["model"] = str(write_eagle3(root / method, target, SHAPE, tensors=tensors))
    elif method == "draft_model":
        ends = {"eos_token_id": 2, "pad_token_id": 3}
        settings["model"] = str(make_tiny("llama", root / method, vocab_size=VOCAB, **ends))
    elif method in ("dflash", "dspark"):
        more: dict[str, Any] = {}
        tensors = dflash_tensors(SHAPE, Block())
        if method == "dspark":
            more = {"speculators_model_type": method, "markov_rank": 4}
            more |= {"markov_head_type": "vanilla", "enable_confidence_head": False}
            for i, rows in ((1, VOCAB), (2, SHAPE.draft_vocab)):
                name = f"markov_head.markov_w{i}.weight"
                tensors[name] = gen(name, [rows, 4], 1.0)
        path = write_dflash(root / method, target, SHAPE, Block(), tensors=tensors, **more)
        settings["model"] = str(path)
    return settings


def transitions(
    method: str,
    root: Path,
    make_engine: MakeEngine,
    num_tokens: int,
    first_seed: int = 0,
    ranks: int = 1,
    length: int = LENGTH,
) -> tuple[Tensor, Tensor, float]:
    """The chain's logits, `[vocab, vocab]` counts of what was sampled, and the share of the tokens
    that were accepted drafts. Parts with seeds of their own can be added up."""
    target = chain(root)
    llm = make_engine(
        "qwen3_5",
        model=str(target),
        max_model_len=length + 8,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS * (1 + DRAFTS),
        enable_prefix_caching=False,
        tensor_parallel_size=ranks,
        speculative_config=settings_of(method, target, root),
    )
    table, accepted = torch.zeros(VOCAB, VOCAB), 0
    count = num_tokens // length
    prompts = [TokensPrompt(prompt_token_ids=[i % VOCAB]) for i in range(count)]
    params = [
        SamplingParams(
            temperature=1, seed=first_seed + i, max_tokens=length, ignore_eos=True, detokenize=False
        )
        for i in range(count)
    ]
    for output in llm.generate(prompts, params, use_tqdm=False):
        (one,) = output.outputs
        tokens = torch.tensor([*output.prompt_token_ids, *one.token_ids])
        pairs = tokens[:-1] * VOCAB + tokens[1:]
        table += torch.bincount(pairs, minlength=VOCAB**2).view(VOCAB, VOCAB)
        accepted += (one.num_drafts or (0, 0))[0]
    assert int(table.sum()) == count * length
    return logits_of(target), table, accepted / (count * length)


@pytest.fixture
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of random heads are hardly ever accepted, which never pays."""
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, count: policy.num_drafts)


@dataclass
class Biased:
    """Verifies as ever, but takes one draft in a hundred for the sample it is compared with. (What
    `ngram` looks up has nearly the model's law, so that it would bias these tokens too little.)"""

    source: torch.Generator

    def __call__(self, problem: AcceptProblem) -> None:
        tokens, sampled = problem.progress.tokens.long(), problem.sampled
        for row, first, count, _ in problem.requests.tolist():
            chances = torch.rand(max(count - 1, 0), generator=self.source)
            wrong = (chances < 0.01).to(sampled.device)
            drafts = tokens[row, 1:count]
            part = sampled[first : first + len(wrong)]
            part.copy_(torch.where(wrong, drafts, part))
        accept(problem)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("law")


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("always_drafting")
def test_tokens_have_the_models_law(method: str, root: Path, make_engine: MakeEngine) -> None:
    logits, table, accepted = transitions(method, root, make_engine, NUM_TOKENS)
    assert abs(deviation(logits, table)) < BOUND
    assert (accepted > 0.03) == (method != "none")


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
@pytest.mark.usefixtures("always_drafting")
def test_a_bias_of_one_percent_is_noticed(
    method: str, root: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_inputs, "accept", Biased(torch.Generator().manual_seed(5)))
    logits, table, _ = transitions(method, root, make_engine, NUM_TOKENS)
    assert abs(deviation(logits, table)) > BOUND


# ---- two ranks that share the vocabulary ---------------------------------------------------------


@pytest.fixture
def halves(forking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of the tokens, of the drafts' vocabulary as well: rows are not padded."""
    init = VocabParallelEmbedding.__init__
    monkeypatch.setattr(VocabParallelEmbedding, "__init__", partialmethod(init, padding_size=1))


@on_cpus
@pytest.mark.parametrize("method", ["eagle3", *nightly(*(m for m in METHODS if m != "eagle3"))])
@pytest.mark.usefixtures("always_drafting", "halves")
def test_tokens_of_two_ranks_have_the_models_law(
    method: str, root: Path, make_engine: MakeEngine
) -> None:
    logits, table, accepted = transitions(method, root, make_engine, **FEW)
    assert abs(deviation(logits, table)) < BOUND
    assert (accepted > 0.03) == (method != "none")


@on_cpus
@pytest.mark.usefixtures("always_drafting", "halves")
def test_noise_that_is_not_the_tokens_own_is_noticed(
    root: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first rank's tokens on both."""
    noisy = naive._noisy
    monkeypatch.setattr(naive, "_noisy", lambda *parts: noisy(*parts[:4], 0, parts[5]))
    logits, table, _ = transitions("eagle3", root, make_engine, **FEW)
    assert abs(deviation(logits, table)) > BOUND
