# SPDX-License-Identifier: Apache-2.0
"""A supernet's placements: the tokens of each are those of the equivalent fixed model, and changing
them while requests come and go corrupts none and leaks nothing. Every night all 256 are tried
instead of a sample, and a thousand changes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apriel2_models import MIXERS, Reference, make_tensors, pattern, save, stochastic, thinned
from nightly import nightly
from parity_checks import (
    MakeEngine,
    core_in_this_process,
    generate,
    in_this_process,
    journal_bytes,
    of_workers,
    on_cpus,
    one_replica,
    one_stage,
    prompts,
)

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [pytest.mark.slow, pytest.mark.parity, one_stage]

LAYERS = 4
ALL = [list(names) for names in itertools.product(MIXERS, repeat=LAYERS)]
SAMPLE = [
    *([name] * LAYERS for name in MIXERS),
    ["attention", "gdn", "kda", "sliding_window"],
    ["kda", "kda", "sliding_window", "gdn"],
]


class Supernet:
    """A checkpoint, and the equations of any of its placements."""

    def __init__(self, path: Path) -> None:
        self.decoder = stochastic(LAYERS)
        self.tensors = make_tensors(self.decoder)
        self.path = save(path / "supernet", self.decoder, self.tensors)

    def fixed(self, path: Path, names: list[str]) -> Path:
        """The same weights under a pattern."""
        return save(path, pattern(names), self.tensors)

    def assert_equals(self, output: RequestOutput, names: list[str]) -> None:
        """Every token is the choice of that placement's equations, given those before it."""
        prompt, tokens = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
        reference = Reference(self.decoder, self.tensors, names)
        logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist(), names


@pytest.fixture(scope="module")
def supernet(tmp_path_factory: pytest.TempPathFactory) -> Supernet:
    return Supernet(tmp_path_factory.mktemp("apriel2"))


def make(make_engine: MakeEngine, path: Path, **settings: Any) -> LLM:
    settings = {"max_num_batched_tokens": 64, "enable_prefix_caching": True} | settings
    return make_engine("llama", model=str(path), **settings)


def as_dict(names: list[str]) -> dict[int, str]:
    return dict(enumerate(names))


@pytest.mark.parametrize(
    ("first", "tried"),
    [*((name, SAMPLE) for name in MIXERS), *nightly(*((n, ALL) for n in MIXERS))],
    ids=lambda value: value if isinstance(value, str) else f"of {len(value)}",
)
def test_every_placement_is_the_fixed_model(
    first: str, tried: list[list[str]], supernet: Supernet, make_engine: MakeEngine
) -> None:
    """Those whose first layer has this mixer; also when the same tokens were cached under another
    placement."""
    llm = make(make_engine, supernet.path)
    batch = prompts((1, 20, 70))
    for names in [names for names in tried if names[0] == first]:
        assert llm.change_placement(names) == of_workers(as_dict(names))
        for _ in range(2):
            outputs = generate(llm, batch, 6)
        assert outputs[-1].num_cached_tokens
        for output in outputs:
            supernet.assert_equals(output, names)


@core_in_this_process
def test_bits_are_those_of_the_fixed_model_and_come_back(
    supernet: Supernet, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """From one placement to another and back; groups and pages are the fixed model's, too."""
    llm = make(make_engine, supernet.path, logprobs_mode="raw_logprobs")
    batch = prompts((5, 40, 70))

    def logprobs(engine: LLM) -> list[list[float]]:
        outputs = generate(engine, batch, 8)
        rows = [output.outputs[0].logprobs or [] for output in outputs]
        return [[entry.logprob for step in row for entry in step.values()] for row in rows]

    seen = {}
    for i, names in enumerate(SAMPLE * 2):
        assert llm.collective_rpc("set_layer_placements", args=(names,)) == of_workers(
            as_dict(names)
        )
        assert llm.collective_rpc("get_layer_placements") == of_workers(as_dict(names))
        found = logprobs(llm)
        assert seen.setdefault(tuple(names), found) == found
        if i < len(SAMPLE):
            fixed = make(make_engine, supernet.fixed(tmp_path / str(i), names))
            assert logprobs(fixed) == found
            ours, theirs = (
                engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
                for engine in (llm, fixed)
            )
            assert [len(g.layer_names) for g in ours.kv_cache_groups] == [
                len(g.layer_names) for g in theirs.kv_cache_groups
            ]
            assert ours.plan.page_bytes == theirs.plan.page_bytes
            # Given bytes were the arena's alone at the start, where no journal was.
            journals = journal_bytes(llm)
            less = (theirs.num_blocks - ours.num_blocks) * ours.plan.page_bytes
            assert journals <= less < journals + ours.plan.page_bytes


def test_a_start_with_a_placement(supernet: Supernet, make_engine: MakeEngine) -> None:
    llm = make(make_engine, supernet.path, placement="every2nd-gdn")
    names = ["attention", "gdn", "attention", "gdn"]
    assert llm.collective_rpc("get_layer_placements") == of_workers(as_dict(names))
    assert llm.collective_rpc("get_mixer_names") == of_workers(tuple(MIXERS))
    for output in generate(llm, prompts((20,)), 6):
        supernet.assert_equals(output, names)
    assert [group.layers for group in llm.explain().groups] == [2, 2]
    llm.change_placement("all-kda")
    assert [group.layers for group in llm.explain().groups] == [LAYERS]


@in_this_process
def test_a_thinned_supernet(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Layers have different mixers to choose from, the last one none: its name is ignored."""
    decoder = thinned()
    tensors = make_tensors(decoder)
    llm = make(make_engine, save(tmp_path, decoder, tensors))
    assert llm.collective_rpc("get_mixer_names") == [("attention", "gdn", "kda")]
    for names in (None, ["gdn", "gdn", "gdn"], ["attention", "kda", "_"]):
        if names is not None:
            assert llm.change_placement(names) == [{0: names[0], 1: names[1]}]
        reference = Reference(decoder, tensors, names or ["gdn", "kda", "_"])
        (output,) = generate(llm, prompts((20,)), 6)
        prompt, tokens = list(output.prompt_token_ids or []), list(output.outputs[0].token_ids)
        logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist(), names
    with pytest.raises(VLLMValidationError, match="layer 1 has no mixer 'attention'; it has gdn"):
        llm.change_placement("all-attention")


@one_replica
def test_what_is_refused_changes_nothing(
    supernet: Supernet, make_engine: MakeEngine, tmp_path: Path
) -> None:
    memory = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 2048}
    llm = make(make_engine, supernet.path, placement="all-gdn", **memory)
    before = generate(llm, prompts((30,)), 6)[0].outputs[0].token_ids
    refused = [
        (["gdn"] * 3, "it names 3 layers"),
        (None, "expected a list of names, or a string, got None"),
        (["gdn", "gdn", "gdn", "mamba"], "layer 3 has no mixer 'mamba'; it has attention"),
        ("all-attention", "placement: One request of max_model_len 2048 needs"),
    ]
    for placement, message in refused:
        with pytest.raises(VLLMValidationError, match=message):
            llm.change_placement(placement)
        assert llm.collective_rpc("get_layer_placements") == of_workers(as_dict(["gdn"] * LAYERS))
        output = generate(llm, prompts((30,)), 6)[0]
        assert output.outputs[0].token_ids == before
        assert output.num_cached_tokens
    with pytest.raises(VLLMValidationError, match="takes one placement"):
        llm.collective_rpc("set_layer_placements")
    engine = llm.llm_engine
    engine.add_request("running", TokensPrompt(prompt_token_ids=[1, 2]), SamplingParams())
    with pytest.raises(VLLMValidationError, match="requests are running"):
        llm.change_placement("all-kda")
    engine.abort_all()
    engine.step()
    fixed = supernet.fixed(tmp_path / "fixed", ["gdn"] * LAYERS)
    with pytest.raises(VLLMValidationError, match="no supernet"):
        make(make_engine, fixed).change_placement("all-gdn")
    with pytest.raises(VLLMValidationError, match="no supernet"):
        make(make_engine, fixed, placement="all-gdn")
    with pytest.raises(VLLMValidationError, match="--placement-alias .* no supernet"):
        make(make_engine, fixed, placement_alias=["x=all-gdn"])
    with pytest.raises(VLLMValidationError, match="--max-request-placements: .* no supernet"):
        make(make_engine, fixed, max_request_placements=2)
    with pytest.raises(VLLMValidationError, match="LlamaForCausalLM has one per layer"):
        make_engine("llama", placement="all-gdn")


def test_drafts_and_the_sanitizer_go_on(supernet: Supernet, make_engine: MakeEngine) -> None:
    drafter = {"method": "replay", "num_speculative_tokens": 3, "acceptance": 0.5}
    llm = make(make_engine, supernet.path, speculative_config=drafter, sanitize=True)
    for names in (*SAMPLE[-2:], SAMPLE[0]):
        llm.change_placement(names)
        for output in generate(llm, prompts((5, 40)), 8):
            supernet.assert_equals(output, names)
    with pytest.raises(VLLMValidationError, match="two placements at once: drafts"):
        llm.llm_engine.engine_core.call_utility("overlap_placement", "all-gdn")


@pytest.mark.usefixtures("forking")
@on_cpus
def test_all_ranks_change_together(supernet: Supernet, make_engine: MakeEngine) -> None:
    llm = make(make_engine, supernet.path, tensor_parallel_size=2)
    names = SAMPLE[-2]
    assert llm.change_placement(names) == [as_dict(names)] * 2
    with pytest.raises(VLLMValidationError, match="layer 0 has no mixer 'mamba'"):
        llm.change_placement(["mamba"] * LAYERS)
    for output in generate(llm, prompts((20,)), 6):
        supernet.assert_equals(output, names)


# ---- under load ----------------------------------------------------------------------------------


@pytest.fixture
def served(supernet: Supernet, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    # What the engine's process holds is asked by a function.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    args = AsyncEngineArgs(
        model=str(supernet.path),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=8 * 2**20,
        # Kernels of all mixers are compiled at the start, side by side.
        placement=SAMPLE[-2],
    )
    engine = AsyncLLM.from_engine_args(args)
    yield engine
    engine.shutdown()


def held_bytes(worker: Any) -> int:
    """Of all tensors of the worker's process: of the host's each memory once, and what a GPU's
    allocator has given out. Tensors on a GPU would not do: what graphs compute are aliases, which
    overlap or not as it happened when they were captured."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = [one.untyped_storage() for one in found if one.device.type == "cpu"]
    on_device = torch.cuda.memory_allocated() if worker.device.type == "cuda" else 0
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) + on_device


@in_this_process
@pytest.mark.parametrize(
    "changes", [8, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_changes_under_load_corrupt_nothing(
    changes: int, supernet: Supernet, served: AsyncLLM
) -> None:
    """Every request computes all its tokens with one placement: its text is what that placement
    gives when nothing else happens. In the end nothing is left: no page, and no tensor that was
    not there when every mixer had been on every layer."""
    rng = random.Random(0)
    batch = prompts((3, 17, 40, 70))
    ended: list[RequestOutput] = []
    done = asyncio.Event()

    async def one(
        name: str, ids: list[int], length: int, begun: asyncio.Event | None = None
    ) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        async for output in served.generate(TokensPrompt(prompt_token_ids=ids), params, name):
            last = output
            if begun is not None:
                begun.set()
        return last

    async def client(number: int) -> None:
        for turn in itertools.count():
            if done.is_set():
                return
            ids, length = rng.choice(batch), rng.randint(1, 12)
            ended.append(await one(f"{number}-{turn}", ids, length))

    async def change() -> list[list[str]]:
        tried: list[list[str]] = []
        for _ in range(changes):
            await asyncio.sleep(rng.random() * 0.1)
            names = rng.choice(ALL)
            assert await served.change_placement(names) == of_workers(as_dict(names))
            tried.append(names)
        done.set()
        return tried

    async def run() -> None:
        for name in MIXERS:
            await served.change_placement([name] * LAYERS)
            await one(f"first-{name}", batch[3], 12)
        await served.change_placement(["attention"] * LAYERS)
        held = await served.collective_rpc(held_bytes)
        assert min(held) > 8 * 2**20, "the state memory is among it"
        clients = [asyncio.ensure_future(client(i)) for i in range(6)]
        tried = await change()
        await asyncio.gather(*clients)
        assert len(ended) >= changes
        texts: dict[int, list[list[int]]] = {i: [] for i in range(len(batch))}
        for names in dict.fromkeys(map(tuple, [["attention"] * LAYERS, *tried])):
            await served.change_placement(names)
            quiet = (one(f"{names}-{i}", ids, 12) for i, ids in enumerate(batch))
            for i, output in enumerate(await asyncio.gather(*quiet)):
                texts[i].append(list(output.outputs[0].token_ids))
        for output in ended:
            tokens = list(output.outputs[0].token_ids)
            possible = texts[batch.index(list(output.prompt_token_ids or []))]
            assert tokens in [text[: len(tokens)] for text in possible]
            assert output.outputs[0].finish_reason == "length"
        assert len({str(found) for found in texts[3]}) > 1
        running = asyncio.Event()
        busy = asyncio.ensure_future(one("long", batch[0], 200, running))
        await running.wait()
        with pytest.raises(VLLMValidationError, match="requests are running"):
            await served.change_placement("all-gdn", "refuse")
        await busy
        with pytest.raises(VLLMValidationError, match="mode must be 'wait', 'refuse' or 'overlap'"):
            await served.change_placement("all-gdn", "now")
        await served.change_placement(["attention"] * LAYERS)
        assert await served.collective_rpc(held_bytes) == held
        usage = [m for m in served.get_metrics() if m.name == "vllm:kv_cache_usage_perc"]
        assert [metric.value for metric in usage] == [0.0]

    asyncio.run(run())
