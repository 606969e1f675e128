# SPDX-License-Identifier: Apache-2.0
"""Requests choose a supernet's placement: mixed, each gets the tokens of its placement alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from apriel2_models import MIXERS, Reference, make_tensors, save, stochastic
from parity_checks import in_this_process, on_cpus, prompts

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.placed_state import PlacedState
from vllm.v1.worker.sanitizer import SanitizerError

pytestmark = [pytest.mark.slow, pytest.mark.parity, in_this_process]

LAYERS = 2
#: what requests of these tests ask for -> the mixers that they get
ASKED: dict[Any, tuple[str, ...]] = {
    None: ("attention", "attention"),
    "fast": ("gdn", "gdn"),
    "careful": ("attention", "kda"),
    "all-gdn": ("gdn", "gdn"),
    "all-swa": ("sliding_window", "sliding_window"),
    "kda,sliding_window": ("kda", "sliding_window"),
    "attention,gdn": ("attention", "gdn"),
}
ALIASES = {"fast": "all-gdn", "careful": ["attention", "kda"]}
PROMPTS = prompts((1, 17, 35))


class Supernet:
    """A checkpoint, and what each placement of it generates."""

    def __init__(self, path: Path) -> None:
        self.decoder = stochastic(LAYERS)
        self.tensors = make_tensors(self.decoder)
        self.path = save(path, self.decoder, self.tensors)

    @functools.cache  # noqa: B019
    def chosen(self, names: tuple[str, ...], ids: tuple[int, ...]) -> list[int]:
        """The equations' choice after each of these tokens."""
        reference = Reference(self.decoder, self.tensors, list(names))
        return reference.logits(list(ids)).argmax(-1).tolist()

    def assert_equals(self, output: RequestOutput, asked: Any) -> None:
        self.assert_chosen(output, ASKED[asked])

    def assert_chosen(self, output: RequestOutput, names: tuple[str, ...]) -> None:
        """Every token is the choice of this placement's equations, given those before it."""
        prompt, found = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
        expected = self.chosen(names, tuple(prompt + found[:-1]))[len(prompt) - 1 :]
        assert found == expected, names


@pytest.fixture(scope="module")
def supernet(tmp_path_factory: pytest.TempPathFactory) -> Supernet:
    return Supernet(tmp_path_factory.mktemp("apriel2"))


@pytest.fixture(scope="module")
def llm(supernet: Supernet) -> Iterator[LLM]:
    """With two places for placements without an alias."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = make(supernet.path)
    yield engine
    engine.llm_engine.engine_core.shutdown()


def make(path: Path, **settings: Any) -> LLM:
    given: dict[str, Any] = {
        "placement_alias": ALIASES,
        "max_request_placements": 2,
        "max_model_len": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 2**22,
    }
    return LLM(**(given | settings), model=str(path), dtype="float32")


def params(placement: str | list[str] | None, count: int = 10) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, placement=placement)


def run(llm: LLM, asked: Sequence[Any], ids: list[list[int]]) -> list[RequestOutput]:
    batch = [TokensPrompt(prompt_token_ids=one) for one in ids]
    return llm.generate(batch, [params(one) for one in asked], use_tqdm=False)


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def test_mixed_requests_get_their_placements_tokens(supernet: Supernet, llm: LLM) -> None:
    """The same prompts with every placement at once, twice: what one of them cached is found by
    its own requests and by no other's."""
    asked = [one for one in list(ASKED)[:6] for _ in PROMPTS]
    batch = PROMPTS * 6
    first, second = run(llm, asked, batch), run(llm, asked, batch)
    for outputs in (first, second):
        for output, one in zip(outputs, asked, strict=True):
            supernet.assert_equals(output, one)
    longest = [i for i, ids in enumerate(batch) if len(ids) == 35]
    assert all(second[i].num_cached_tokens for i in longest[:3])
    assert len({tuple(first[i].outputs[0].token_ids) for i in longest}) == 5
    names = [placed.placement for placed in scheduler(llm).kv_cache_config.placements]
    assert names[:3] == ["attention,attention", "gdn,gdn", "attention,kda"]
    assert scheduler(llm).kv_cache_manager.usage == 0


@pytest.mark.parametrize("how", ["plain", "deferred", "sanitized"])
def test_placements_come_and_go_at_random(
    how: str, supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of random placements, some aborted, some started again, some continued, while there
    is memory for few of them; placements without an alias wait for each other's place. Also where
    recurrent states wait in journals, which placements share, and with every step checked."""
    deferred = how == "deferred"
    monkeypatch.setattr(type(current_platform), "defers_commit", deferred)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = make(supernet.path, num_gpu_blocks_override=5, sanitize=how == "sanitized")
    rng, engine = random.Random(1), llm.llm_engine
    asked: dict[str, Any] = {}
    turns: list[tuple[Any, list[int]]] = []
    left, ended, preempted, retired = 24, 0, False, set()
    while left or engine.has_unfinished_requests():
        if left and rng.random() < 0.8:
            left -= 1
            name, one = f"random-{left}", rng.choice(list(ASKED))
            ids = rng.choice(PROMPTS)
            if turns and rng.random() < 0.5:
                one, ids = turns.pop()
            asked[name] = one
            prompt = TokensPrompt(prompt_token_ids=ids)
            engine.add_request(name, prompt, params(one, rng.randint(1, 16)))
        if asked and rng.random() < 0.05:
            engine.abort_request(rng.choice(list(asked)))
        if rng.random() < 0.05:
            engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished and output.outputs[0].finish_reason != "abort":
                assert output.outputs[0].finish_reason == "length"
                supernet.assert_equals(output, asked[output.request_id])
                ended += 1
                ids = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids, 7]
                turns.append((asked[output.request_id], ids))
        preempted |= any(one.num_preemptions for one in scheduler(llm).requests.values())
        retired |= {placed.placement for placed in scheduler(llm).kv_cache_config.placements}
    assert ended > 15
    assert deferred == (llm.llm_engine.vllm_config.cache_config.commit_interval > 1)
    assert len(retired) == 6
    assert preempted
    pool = scheduler(llm).kv_cache_manager.block_pool
    assert scheduler(llm).kv_cache_manager.usage == 0
    assert llm.reset_prefix_cache()
    assert pool.pages.num_free_pages == pool.pages.num_pages - 1
    engine.engine_core.shutdown()


def test_a_step_with_another_placements_memory_is_named(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sanitizer: layers that stay with the memory of another placement that has them, and
    what is written to blocks after their placement was retired. Graphs would keep the addresses of
    their capture."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def started() -> LLM:
        engine = make(supernet.path, max_request_placements=1, sanitize=True, enforce_eager=True)
        supernet.assert_equals(run(engine, ["kda,sliding_window"], PROMPTS[-1:])[0], asked)
        return engine

    asked = "kda,sliding_window"
    llm = started()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlacedState, "bind", lambda self: None)
        with pytest.raises(SanitizerError, match="nothing was written there|was not written by"):
            run(llm, ["careful", None, "careful"], PROMPTS)
    llm.llm_engine.engine_core.shutdown()
    llm = started()
    set_placement = ModelRunner.set_placement

    def write_after(self: ModelRunner, *given: Any) -> bool:
        done = set_placement(self, *given)
        self.arena.buffer[self.arena.plan.page_bytes :] = 1
        return done

    monkeypatch.setattr(ModelRunner, "set_placement", write_after)
    with pytest.raises(SanitizerError, match="was written to"):
        run(llm, ["attention,gdn"], PROMPTS[-1:])
    llm.llm_engine.engine_core.shutdown()


def test_a_change_of_the_engines_own(supernet: Supernet, llm: LLM) -> None:
    """Aliases stay, and so does what a request asks for; what asks for nothing gets the new one."""
    llm.change_placement("all-kda")
    outputs = run(llm, [None, "fast", "all-swa"], PROMPTS[:1] * 3)
    supernet.assert_chosen(outputs[0], ("kda", "kda"))
    supernet.assert_equals(outputs[1], "fast")
    supernet.assert_equals(outputs[2], "all-swa")
    assert llm.collective_rpc("get_layer_placements") == [{0: "kda", 1: "kda"}]
    llm.change_placement("careful")
    supernet.assert_equals(run(llm, [None], PROMPTS[:1])[0], "careful")
    assert llm.explain().groups
    llm.change_placement("all-attention")


def test_a_change_beside_what_runs(supernet: Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run end with the old placement, new ones have the new one at once, and what
    others cached is still there; the new one stays while others come and go."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = make(supernet.path, max_request_placements=2)
    engine, change = llm.llm_engine, "overlap_placement"
    run(llm, ["fast"], PROMPTS[-1:])
    found: dict[str, RequestOutput] = {}

    def add(name: str, asked: Any, count: int = 10) -> None:
        prompt = TokensPrompt(prompt_token_ids=PROMPTS[-1])
        engine.add_request(name, prompt, params(asked, count))

    def step() -> None:
        found.update((one.request_id, one) for one in engine.step() if one.finished)

    add("old", None, 40)
    for _ in range(5):
        step()
    told = engine.engine_core.call_utility(change, "kda,swa")
    assert told.placements == [{0: "kda", 1: "sliding_window"}] and not told.is_busy
    for name, asked in (("new", None), ("alias", "fast"), ("chosen", "attention,gdn")):
        add(name, asked)
    while "new" not in found:
        step()
    assert "old" not in found
    while engine.has_unfinished_requests():
        step()
    supernet.assert_equals(found["old"], None)
    supernet.assert_equals(found["new"], "kda,sliding_window")
    supernet.assert_equals(found["alias"], "fast")
    supernet.assert_equals(found["chosen"], "attention,gdn")
    assert found["alias"].num_cached_tokens and not found["new"].num_cached_tokens
    run(llm, ["all-swa", "attention,gdn", "all-swa"], PROMPTS)
    (again,) = run(llm, [None], PROMPTS[-1:])
    supernet.assert_equals(again, "kda,sliding_window")
    assert again.num_cached_tokens
    assert llm.collective_rpc("get_layer_placements") == [{0: "kda", 1: "sliding_window"}]
    for asked in ("all-swa", "attention,gdn"):
        add(asked, asked)
    step()
    for refused, message in (
        ("gdn,swa", "requests use all 2 places"),
        ("all-x", "layer 0 has no mixer 'x'"),
    ):
        with pytest.raises(VLLMValidationError, match=message):
            engine.engine_core.call_utility(change, refused)
    while engine.has_unfinished_requests():
        step()
    supernet.assert_equals(run(llm, [None], PROMPTS[:1])[0], "kda,sliding_window")
    engine.engine_core.call_utility(change, "fast")
    supernet.assert_equals(run(llm, [None], PROMPTS[:1])[0], "fast")
    llm.change_placement("all-attention")
    supernet.assert_equals(run(llm, [None], PROMPTS[:1])[0], None)
    engine.engine_core.shutdown()


def test_the_engines_own_takes_no_place(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since it stays: else who waits for the only one would wait for ever, and all behind."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = make(supernet.path, max_request_placements=1)
    engine, found = llm.llm_engine, 0
    for own, asked in (("kda,swa", "all-swa"), ("attention,gdn", "kda,swa"), ("fast", "all-swa")):
        engine.engine_core.call_utility("overlap_placement", own)
        for one in (asked, None, "gdn,attention"):
            prompt = TokensPrompt(prompt_token_ids=PROMPTS[1])
            engine.add_request(f"{own} {one}", prompt, params(one))
        for _ in range(100):
            found += sum(one.finished for one in engine.step())
            if not engine.has_unfinished_requests():
                break
        assert not engine.has_unfinished_requests(), own
    assert found == 9
    assert len(scheduler(llm).kv_cache_config.placements) == 3 + 2
    engine.engine_core.shutdown()


@on_cpus
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_ranks_and_replicas(supernet: Supernet, layout: dict[str, int]) -> None:
    """Placements without an alias take each other's place on all of them; a change and a sleep
    reach all."""
    llm = make(supernet.path, **layout, max_request_placements=1, enable_sleep_mode=True)
    try:
        asked = ["fast", None, "kda,sliding_window", "careful", "attention,gdn", "all-swa"]
        outputs = run(llm, asked, [PROMPTS[1]] * len(asked))
        for output, one in zip(outputs, asked, strict=True):
            supernet.assert_equals(output, one)
        assert llm.change_placement("careful") == [{0: "attention", 1: "kda"}] * 2
        if "data_parallel_size" in layout:
            now = llm.llm_engine.vllm_config.cache_config.capacity_tokens
            assert llm.llm_engine.engine_core.router._chooser._capacities.sum() == now
        llm.sleep(2)
        llm.wake_up()
        for output in run(llm, [None, "careful"], [PROMPTS[1]] * 2):
            supernet.assert_equals(output, "careful")
        supernet.assert_equals(run(llm, ["attention,gdn"], [PROMPTS[0]])[0], "attention,gdn")
    finally:
        llm.shutdown()


def test_explain_knows_the_pages(llm: LLM) -> None:
    """Which were chosen for the aliases, too."""
    told, plan = llm.explain(), scheduler(llm).kv_cache_config.plan
    assert (told.page_bytes, told.num_pages) == (plan.page_bytes, plan.num_pages)
    assert [group.layers for group in told.groups] == [LAYERS]


def test_a_long_prompt_is_computed_again_by_few_states(
    supernet: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a preemption, with many times more tokens in a step than there are state slots: none
    of them may be left out."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    length = 16384
    positions = {"embeddings": {"max_position_embeddings": 2 * length}}
    engine = make(
        save(tmp_path, supernet.decoder, supernet.tensors, **positions),
        placement="all-gdn",
        placement_alias=[],
        max_model_len=2 * length,
        max_num_batched_tokens=2 * length,
        num_gpu_blocks_override=4,
        enable_prefix_caching=False,
    )
    try:
        (prompt,) = prompts((length,), seed=1)
        (alone,) = run(engine, [None], [prompt])
        inner = engine.llm_engine
        inner.add_request("again", TokensPrompt(prompt_token_ids=prompt), params(None))
        inner.step()
        (request,) = scheduler(engine).requests.values()
        assert inner.reset_prefix_cache(reset_running_requests=True)
        found: list[RequestOutput] = []
        while inner.has_unfinished_requests():
            found += inner.step()
        assert request.num_preemptions == 1
        assert found[-1].outputs[0].token_ids == alone.outputs[0].token_ids
        assert scheduler(engine).kv_cache_config.plan.num_blocks(0) < length / 100
    finally:
        engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (["gdn"], "it names 1 layers, but the model has 2"),
        ("gdn,mamba", "layer 1 has no mixer 'mamba'; it has attention, sliding_window, gdn, kda"),
        ("nothing", "it names 1 layers"),
        ([], "expected|it names 0 layers"),
        (["fast"], "it names 1 layers"),
        (["gdn,gdn"], "it names 1 layers"),
    ],
)
def test_a_bad_placement_is_refused_at_once(llm: LLM, placement: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        run(llm, [placement], PROMPTS[:1])
    assert caught.value.parameter == "placement"
    assert not llm.llm_engine.has_unfinished_requests()


def test_long_spellings_are_not_remembered(supernet: Supernet, llm: LLM) -> None:
    """Spaces around names are free, and clients send as many as they like; nor does a refusal
    repeat what it was sent."""
    long = 1 << 20
    supernet.assert_equals(run(llm, [f"gdn,{' ' * long}gdn"], PROMPTS[:1])[0], "all-gdn")
    placements = llm.llm_engine.engine_core.engine_core._placements  # type: ignore[attr-defined]
    assert sum(map(len, placements._spelled)) < long
    with pytest.raises(VLLMValidationError, match="has no mixer 'xx") as caught:
        run(llm, [["gdn", "x" * long]], PROMPTS[:1])
    assert len(str(caught.value)) < 300


def test_what_does_not_fit_is_refused(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A block larger than the pages that were chosen without it; no placement but the aliases;
    choices where drafts are verified; an alias that is none, or has a name that is taken."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = make(supernet.path, placement_alias=[], max_request_placements=1)
    try:
        with pytest.raises(VLLMValidationError, match="more than a page of the arena .* name it"):
            run(engine, ["all-kda"], PROMPTS[:1])
        outputs = run(engine, ["all-swa", "attention,swa"], PROMPTS[:1] * 2)
        supernet.assert_chosen(outputs[0], ("sliding_window", "sliding_window"))
        supernet.assert_chosen(outputs[1], ("attention", "sliding_window"))
    finally:
        engine.llm_engine.engine_core.shutdown()
    engine = make(supernet.path, max_request_placements=0)
    try:
        supernet.assert_equals(run(engine, ["all-gdn"], PROMPTS[:1])[0], "all-gdn")
        with pytest.raises(
            VLLMValidationError, match="0 allows no other; use fast, careful or leave"
        ):
            run(engine, ["all-swa"], PROMPTS[:1])
    finally:
        engine.llm_engine.engine_core.shutdown()
    drafts = {"method": "replay", "num_speculative_tokens": 2, "acceptance": 0.5}
    with pytest.raises(VLLMValidationError, match="drafts follow the steps of one placement"):
        make(supernet.path, speculative_config=drafts)
    with pytest.raises(VLLMValidationError, match="--max-request-placements lets .* drafts follow"):
        make(supernet.path, placement_alias=[], speculative_config=drafts)
    for chosen in ({}, {"placement": "all-gdn", "placement_alias": []}):
        with pytest.raises(VLLMValidationError, match="cannot be divided into stages; use --tens"):
            make(supernet.path, pipeline_parallel_size=2, **chosen)
    with pytest.raises(VLLMValidationError, match="'x' is no NAME=PLACEMENT"):
        make(supernet.path, placement_alias=["x"])
    with pytest.raises(VLLMValidationError, match="has a name that is in use already"):
        make(supernet.path, placement_alias=["x=all-gdn", "x=all-kda"])
    with pytest.raises(VLLMValidationError, match="'gdn,gdn=all-kda' has a name like a placement"):
        make(supernet.path, placement_alias=["gdn,gdn=all-kda"])
    with pytest.raises(VLLMValidationError, match="all-gdn=all-kda: .*'all-gdn' has the form"):
        make(supernet.path, placement_alias=["all-kda=kda,kda", "all-gdn=all-kda"])
    with pytest.raises(VLLMValidationError, match="placement.*valid string; got \\[1, 1\\]"):
        make(supernet.path, placement=[1, 1])
    for wrong, message in (("gdn", "it names 1 layers"), ("all-x", "layer 0 has no mixer 'x'")):
        with pytest.raises(VLLMValidationError, match=f"--placement-alias y={wrong}: .*{message}"):
            make(supernet.path, placement_alias=["x=all-gdn", f"y={wrong}"])
    assert set(MIXERS) == {"attention", "sliding_window", "gdn", "kda"}
