# SPDX-License-Identifier: Apache-2.0
"""Apriel2, served: greedy tokens are those of the equations in fp64, whatever happens to a request,
whatever drafts it verifies and whichever mixers the layers have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apriel2_models import MAMBA, MIXERS, Reference, make_tensors, pattern, save, stochastic
from parity_checks import (
    MakeEngine,
    core_in_this_process,
    generate,
    in_this_process,
    on_cpus,
    one_stage,
    prompts,
)
from test_drafts import Run, a_conversation, batches, compare, engine, preemptions

from tests.extraction_options import extraction
from tests.parity.in_process import runner_of
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.exceptions import VLLMValidationError

pytestmark = [pytest.mark.slow, pytest.mark.parity]

LAYOUTS = {
    "mixture": ["attention", "gdn", "kda", "sliding_window"],
    "recurrent": ["gdn", "kda"],
    "attention": ["attention", "sliding_window"],
    "mambas": ["mamba", "mamba_after"],
}


class Checkpoint:
    """A directory and its reference."""

    def __init__(self, path: Path, names: list[str]) -> None:
        decoder = pattern(names, MIXERS | MAMBA)
        tensors = make_tensors(decoder)
        self.path, self.reference = save(path, decoder, tensors), Reference(decoder, tensors)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {
        name: Checkpoint(tmp_path_factory.mktemp(name), layout) for name, layout in LAYOUTS.items()
    }


def assert_equals(output: RequestOutput, reference: Reference) -> None:
    """Every token is the reference's choice given those before it, with its logprob."""
    prompt, (one,) = list(output.prompt_token_ids or []), output.outputs
    tokens = list(one.token_ids)
    logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)
    for i, (token, entry) in enumerate(zip(tokens, one.logprobs or [], strict=True)):
        assert abs(entry[token].logprob - float(expected[i, token])) < 1e-4


@one_stage
@core_in_this_process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_the_equations_with_and_without_drafts(
    layout: str, checkpoints: dict[str, Checkpoint], make_engine: MakeEngine
) -> None:
    """In chunks and batches, after preemptions, from cached prefixes, one token or four at once."""
    checkpoint = checkpoints[layout]
    scenarios: list[Callable[[Run], None]] = [batches, a_conversation, preemptions]
    settings: dict[str, Any] = {"model": str(checkpoint.path), "enable_prefix_caching": True}
    plain = Run(engine(make_engine, 0, **settings))
    for scenario in scenarios:
        scenario(plain)
    for output in plain.outputs:
        assert_equals(output, checkpoint.reference)
    drafted = Run(engine(make_engine, 3, **settings), plain.tokens())
    for scenario in scenarios:
        scenario(drafted)
    compare(drafted.outputs, plain.outputs)


@pytest.mark.parametrize("layout", ["mixture", "mambas"])
def test_the_sanitizer_finds_nothing(
    layout: str, checkpoints: dict[str, Checkpoint], make_engine: MakeEngine
) -> None:
    """With memory so scarce that requests are preempted, and shared prefixes."""
    checkpoint = checkpoints[layout]
    llm = make_engine(
        "llama",
        model=str(checkpoint.path),
        sanitize=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=48,
        kv_cache_memory_bytes=600_000,
    )
    shared, *tails = prompts((60, 30, 40, 33, 1))
    for output in generate(llm, [shared + tail for tail in tails], 12):
        assert_equals(output, checkpoint.reference)


@in_this_process
def test_more_rows_than_states(checkpoints: dict[str, Checkpoint], make_engine: MakeEngine) -> None:
    """Steps (and graphs, where there are any) have room for 64 requests, the memory for a few: rows
    without a state are padding, and who is preempted computes many more tokens than there are
    states."""
    checkpoint = checkpoints["recurrent"]
    llm = make_engine(
        "llama", model=str(checkpoint.path), max_num_seqs=64, kv_cache_memory_bytes=120_000
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    assert max(config.plan.num_blocks(i) for i in range(len(config.kv_cache_groups))) < 32
    preempted = 0
    schedule = scheduler.schedule

    def schedule_and_preempt() -> Any:
        nonlocal preempted
        if preempted < 3 and scheduler.running and scheduler.running[-1].num_output_tokens > 2:
            scheduler._preempt_last()
            preempted += 1
        return schedule()

    scheduler.schedule = schedule_and_preempt
    for output in generate(llm, prompts((1, 90, 1, 60, 75, 2) * 2), 8):
        assert_equals(output, checkpoint.reference)
    assert preempted == 3


def assert_streams(llm: LLM, reference: Reference, layers: list[int]) -> None:
    """What a request's file has is what the equations say."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (prompt,) = prompts((90,))
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    found = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    streams = reference.streams(found["token_ids"].tolist())
    for column, layer in enumerate(layers):
        error = (found["hidden_states"][:, column].double() - streams[layer]).abs().max()
        assert error < 2e-5 * streams[layer].abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_are_the_streams_of_the_equations(
    layout: str, checkpoints: dict[str, Checkpoint], make_engine: MakeEngine, tmp_path: Path
) -> None:
    layers = [0, len(LAYOUTS[layout]) // 2, len(LAYOUTS[layout])]
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    settings |= extraction(tmp_path, layers)
    llm = make_engine("llama", model=str(checkpoints[layout].path), **settings)
    assert_streams(llm, checkpoints[layout].reference, layers)


@in_this_process
def test_hidden_states_are_those_of_the_placement(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Of the one that a supernet starts with, and of those it changes to; the rows' group and its
    blocks are others then, and nothing keeps the old memory."""
    decoder = stochastic(3)
    tensors, layers = make_tensors(decoder), [0, 1, 3]
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    settings |= extraction(tmp_path, layers)
    first = ["gdn", "attention", "kda"]
    llm = make_engine(
        "llama", model=str(save(tmp_path, decoder, tensors)), placement=first, **settings
    )
    arenas = []
    for names in (first, ["kda"] * 3, ["attention", "sliding_window", "gdn"], first):
        if arenas:
            assert llm.change_placement(names) == [dict(enumerate(names))]
        arena = runner_of(llm).arena
        arenas.append(weakref.ref(arena.buffer))
        del arena
        assert_streams(llm, Reference(decoder, tensors, names), layers)
        assert sum(one() is not None for one in arenas) == 1


@in_this_process
def test_other_connectors_keep_the_placement(make_engine: MakeEngine, tmp_path: Path) -> None:
    """They know the memory by its addresses; what is refused changes nothing."""
    decoder = stochastic(2)
    tensors = make_tensors(decoder)
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    path = save(tmp_path, decoder, tensors)
    llm = make_engine("llama", model=str(path), kv_transfer_config=transfer)
    with pytest.raises(VLLMValidationError, match="ExampleConnector knows the layers' memory by"):
        llm.change_placement("all-gdn")
    assert llm.collective_rpc("get_layer_placements") == [{0: "attention", 1: "attention"}]
    for output in generate(llm, prompts((20,)), 6):
        assert_equals(output, Reference(decoder, tensors, ["attention"] * 2))


@pytest.mark.usefixtures("forking")
@on_cpus
@pytest.mark.parametrize("layout", ["mixture", "mambas"])
def test_two_ranks_compute_the_same(
    layout: str, checkpoints: dict[str, Checkpoint], make_engine: MakeEngine
) -> None:
    """Projections are cut section by section, convolutions, decays and biases with their heads."""
    checkpoint = checkpoints[layout]
    llm: LLM = make_engine("llama", model=str(checkpoint.path), tensor_parallel_size=2)
    for output in generate(llm, prompts((1, 40)), 12):
        assert_equals(output, checkpoint.reference)
