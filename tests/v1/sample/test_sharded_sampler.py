# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a vocabulary sample what one that has the whole of it samples."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.distributed import parallel_state
from vllm.kernels.sampling import naive
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import NO_TOKEN, SamplerOutput
from vllm.v1.sample.adjusted_rows import AdjustedRow, adjusted_rows
from vllm.v1.sample.adjustments import Adjustments
from vllm.v1.sample.metadata import MOST_BEST, SamplingMetadata
from vllm.v1.sample.sampler import gather_logprobs, sample
from vllm.v1.sample.token_masks import TokenMasks
from vllm.v1.sample.vocab_shard import VocabShard
from vllm.v1.structured_output.mask_words import pack_tokens

CPU = torch.device("cpu")
VOCAB, ROWS = 700, 6
#: of one rank's part, as the embedding pads it to 64 rows: of four ranks the last has few tokens
WIDTHS = {2: 384, 3: 256, 4: 192, 5: 192}
PROMPT = np.arange(40)


@dataclass(frozen=True)
class Case:
    """`rows` of parameters, taken in turn."""

    rows: list[dict[str, Any]]
    logits: Callable[[], Tensor] = lambda: torch.randn(ROWS, VOCAB) * 3
    barred: dict[int, list[int]] = field(default_factory=dict)

    def params(self) -> list[SamplingParams]:
        turns = [self.rows[i % len(self.rows)] for i in range(ROWS)]
        return [
            SamplingParams(**{"temperature": 1.0, "seed": i, **row}) for i, row in enumerate(turns)
        ]


def coarse() -> Tensor:
    """Many ties, within a rank's part and between parts, also with the best."""
    return (torch.randn(ROWS, VOCAB) * 2).round()


def flat() -> Tensor:
    """Most draws are not among a row's best."""
    return torch.randn(ROWS, VOCAB)


def with_holes() -> Tensor:
    """A row of -inf, one of NaN, one with a NaN, one with all but one token barred."""
    logits = torch.randn(ROWS, VOCAB)
    logits[0], logits[1] = -torch.inf, torch.nan
    logits[2, 500] = torch.nan
    logits[3] = -torch.inf
    logits[3, 699] = 1.0
    return logits


def narrow() -> Tensor:
    return torch.randn(ROWS, VOCAB).to(torch.bfloat16)


GREEDY: dict[str, Any] = {"temperature": 0.0}
PENALISED: dict[str, Any] = {
    "repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.9,
}  # fmt: skip
BIASED: dict[str, Any] = {"logit_bias": {3: 9.0, 290: 9.5, 650: 10.0, 699: -50.0}}
CASES = {
    "greedy": Case([GREEDY]),
    "greedy among ties": Case([GREEDY], coarse),
    "greedy in bfloat16": Case([GREEDY | {"logprobs": 3}], narrow),
    "nothing to sample": Case([GREEDY], with_holes),
    "nothing to draw": Case([{}, {"top_k": 5}, {"min_p": 0.1}], with_holes),
    "plain": Case([{}, {"temperature": 0.5}, GREEDY]),
    "plain in bfloat16": Case([{"temperature": 1.3}], narrow),
    "top-k": Case([{"top_k": 1}, {"top_k": 20}, {}, {"top_k": MOST_BEST}]),
    "top-k among ties": Case([{"top_k": 1}, {"top_k": 7}, {"top_k": 40}], coarse),
    "large top-k": Case([{"top_k": MOST_BEST + 1}, {"top_k": 3}, {"top_k": 600}]),
    "min-p": Case([{"min_p": 0.3}, {"min_p": 0.01}, {}]),
    "min-p among ties": Case([{"min_p": 0.3}, {"min_p": 1.0}], coarse),
    "top-p": Case([{"top_p": 0.5}, {}, {"top_p": 0.95, "min_p": 0.05}]),
    "top-k and top-p": Case([{"top_k": 20, "top_p": 0.6}, {"top_k": 50, "top_p": 0.9}]),
    "top-k and top-p among ties": Case([{"top_k": k, "top_p": 0.8} for k in (2, 9, 33)], coarse),
    "top-k and top-p beside rows without": Case(
        [{"top_k": 5, "top_p": 0.9}, {}, {"min_p": 1e-4}, {"top_k": 3}, {"top_p": 0.7}], flat
    ),
    "all filters": Case([{"top_k": 30, "top_p": 0.7, "min_p": 0.02}, GREEDY, {"top_p": 0.2}]),
    "all filters among ties": Case([{"top_k": 9, "top_p": 0.8, "min_p": 0.1}], coarse),
    "logprobs": Case([{"logprobs": 0}, {"logprobs": 7}, {}]),
    "many logprobs": Case([{"logprobs": MOST_BEST}]),
    "all logprobs": Case([{"logprobs": -1}]),
    "penalties": Case([GREEDY | PENALISED, PENALISED | {"logprobs": 2}, {"top_k": 5} | PENALISED]),
    "biases": Case([GREEDY | BIASED | {"logprobs": 1}, {"allowed_token_ids": [5, 300, 680]}]),
    "penalties in bfloat16": Case([GREEDY | PENALISED, PENALISED, {"logprobs": 1}], narrow),
    "masks": Case(
        [GREEDY, {"logprobs": 2}, {"top_p": 0.8}], barred={0: [690], 1: [1, 400], 2: [2]}
    ),
    "no token is allowed": Case([GREEDY, {}, {"top_k": 4}], barred={0: [], 1: [], 2: []}),
}
STOPPED = SamplingParams(
    temperature=1.0, seed=1, min_tokens=9, stop_token_ids=list(range(600)), bad_words=[]
)


def adjusted(params: list[SamplingParams]) -> Any:
    """Requests with some output, one of them below its minimum length and one with bad words."""
    rows = []
    for row, one in enumerate(params):
        if row == 4:
            one = STOPPED
        if row == 5:
            one = SamplingParams(temperature=1.0, seed=1)
            one.bad_words_token_ids = [[7, 300], [7, 660], [5]]
        output = np.array([7] * (row + 1) + [300, 7])
        tokens = np.concatenate([PROMPT, output])
        made = Adjustments(one, tokens, len(PROMPT), VOCAB, CPU)
        rows.append(AdjustedRow(row, made, len(output)))
    return adjusted_rows(rows, CPU)


def run(case: Case, name: str, take: Callable[[Tensor], Tensor], shard: VocabShard | None) -> Any:
    """The sample of a case; `take`: the part of the whole logits that the sampler gets."""
    torch.manual_seed(len(name))
    logits = case.logits()
    params = case.params()
    metadata = SamplingMetadata.build(params, VOCAB, CPU)
    masks = None
    if case.barred:
        words = np.stack([pack_tokens(ids, VOCAB) for ids in case.barred.values()])
        masks = TokenMasks(torch.tensor(list(case.barred)), torch.from_numpy(words))
    changes = adjusted(params) if name.startswith(("penalties", "biases")) else None
    positions = torch.arange(ROWS) + len(PROMPT) + 8
    return sample(take(logits), metadata, positions, changes, masks, shard)


def part_of(shard: VocabShard) -> Callable[[Tensor], Tensor]:
    """What the head of one rank gives: its rows, then those of padding."""

    def take(logits: Tensor) -> Tensor:
        own = logits.new_full((len(logits), shard.width), 1e4)
        own[:, : shard.size] = logits[:, shard.first : shard.first + shard.size]
        return own

    return take


def _rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    parallel_state.init_distributed_environment(ranks, rank, method, backend="gloo")
    parallel_state.initialize_model_parallel(ranks)
    shard = VocabShard(VOCAB, WIDTHS[ranks], parallel_state.get_tp_group())
    found = {name: run(case, name, part_of(shard), shard) for name, case in CASES.items()}
    torch.save(found, folder / f"{ranks}-{rank}.pt")
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="module", params=[2, 3, 5])
def of_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, SamplerOutput]]:
    """Of each rank, all cases; of five ranks the last has no token."""
    folder, ranks = tmp_path_factory.mktemp("ranks"), request.param
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(r, ranks, folder)) for r in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"{ranks}-{r}.pt", weights_only=False) for r in range(ranks)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes on a CPU")
@pytest.mark.parametrize("name", CASES)
def test_ranks_sample_what_one_does(name: str, of_ranks: list[dict[str, SamplerOutput]]) -> None:
    case = CASES[name]
    expected = run(case, name, lambda logits: logits, None)
    for rank in of_ranks:
        found = rank[name]
        assert torch.equal(found.sampled_token_ids, expected.sampled_token_ids)
        assert (found.logprobs is None) is (expected.logprobs is None)
        if expected.logprobs is None:
            continue
        assert torch.equal(found.logprobs.ranks, expected.logprobs.ranks)
        torch.testing.assert_close(
            found.logprobs.logprobs, expected.logprobs.logprobs, rtol=0, atol=1e-6
        )
        if case.logits is not narrow:  # which of equal ones is told first is nobody's promise
            assert torch.equal(found.logprobs.token_ids, expected.logprobs.token_ids)


def test_the_cases_are_cases() -> None:
    """Filters drop tokens that would be drawn, holes have no token, ties are there."""
    drawn = {
        name: run(case, name, lambda logits: logits, None).sampled_token_ids
        for name, case in CASES.items()
    }
    assert (drawn["nothing to sample"][:3] == NO_TOKEN).all()
    assert drawn["nothing to draw"][:4].tolist() == [NO_TOKEN] * 3 + [699]
    assert (drawn["no token is allowed"][:3] == NO_TOKEN).all()
    assert drawn["masks"][0] == 690
    tied = coarse()
    assert (tied == tied.amax(1, keepdim=True)).sum() > ROWS


def test_rows_that_need_the_whole_vocabulary_are_known() -> None:
    rows = [
        {"top_p": 0.5}, {"top_p": 0.5, "top_k": 8}, {"top_k": MOST_BEST + 1},
        GREEDY | {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": MOST_BEST},
    ]  # fmt: skip
    metadata = SamplingMetadata.build(Case(rows).params(), VOCAB, CPU)
    assert metadata.gathered_rows is not None and metadata.gathered_rows.tolist() == [0, 2]
    assert metadata.largest_top_k == MOST_BEST
    unfiltered = SamplingMetadata.build(Case([{}]).params(), VOCAB, CPU)
    assert unfiltered.gathered_rows is None and unfiltered.largest_top_k == 0


@pytest.mark.parametrize("first", [0, 64, 128])
def test_noise_belongs_to_the_token(first: int) -> None:
    """The best draw of all parts is the draw of the whole."""
    from vllm.kernels.sampling import DrawProblem

    torch.manual_seed(0)
    logits = torch.randn(4, 192)
    columns = torch.full((4,), 0.7), torch.arange(4), torch.arange(4) + 9
    whole = naive.draw_tokens(DrawProblem(logits, *columns))
    told = [
        naive.best_draws(DrawProblem(logits[:, i : i + 64], *columns), i, 192)
        for i in range(0, 192, 64)
    ]
    assert torch.equal(naive.first_best(torch.stack(told), 192), whole)
    tokens = told[first // 64][:, 1]
    inside = (whole >= first) & (whole < first + 64)
    assert torch.equal(tokens[inside].long(), whole[inside])


def test_prompt_tokens_are_scored_alike() -> None:
    """A group of one has the whole vocabulary in its part."""
    logits, chosen = torch.randn(5, VOCAB), torch.tensor([0, 699, 5, 300, 64])
    shard = VocabShard(VOCAB, 704, parallel_state.get_tp_group())
    padded = torch.nn.functional.pad(logits, (0, 4), value=9e9)
    found = gather_logprobs(padded, chosen, 4, shard)
    expected = gather_logprobs(logits, chosen, 4)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.ranks, expected.ranks)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-6)
