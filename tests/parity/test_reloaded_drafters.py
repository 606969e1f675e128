# SPDX-License-Identifier: Apache-2.0
"""What drafters keep comes back from host memory and files as it left: their proposals after a
reload are those of a cold run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drafter_engines import DRAFTS, Methods, Watched, always, check_proposals, engine
from parity_checks import MakeEngine, in_this_process, prompts

from tests.distributed.kv_transfer.offload_engines import drain, offloading
from tests.distributed.kv_transfer.p2p_engines import hand_on, transfer
from tests.nightly import nightly
from vllm.distributed.kv_transfer.kv_connector.v1.p2p import scheduling
from vllm.model_executor.models.draft_head import DraftHead
from vllm.v1.core.sched.draft_policy import DraftPolicy
from vllm.v1.request import Request

pytestmark = [pytest.mark.slow, pytest.mark.parity, in_this_process]


def beginnings() -> list[list[int]]:
    """Prompts that part at the edge of a block, before it and after it, and go on from each other:
    names without the token after a block would find the row of another prompt."""
    (stem,) = prompts((97,))
    rng = random.Random(1)
    parts = [stem[:cut] + [rng.randrange(256) for _ in range(7)] for cut in (97, 96, 95, 64, 65)]
    return [*parts, parts[0] + stem[:20]]


def ask(run: Watched) -> tuple[list[list[int]], list[int]]:
    """What follows each prompt, one after the other, and how much of each was found."""
    outputs = [run.generate([prompt], [9])[0] for prompt in beginnings()]
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens for o in outputs]


@pytest.mark.parametrize(
    "name", ["mtp", "eagle3-llama", "dflash", *nightly("eagle3", "draft_model-hybrid-itself")]
)
def test_proposals_after_a_reload(
    name: str,
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", always)
    method = methods(name)
    settings: dict[str, Any] = {"kv_transfer_config": offloading(root=tmp_path)}
    texts, _ = ask(engine(make_engine, method, 0))

    first = engine(make_engine, method, DRAFTS, **settings)
    cold, _ = ask(first)
    again, found = ask(first)
    assert min(found) >= 48
    drain(first.llm)
    assert first.llm.reset_prefix_cache()
    from_host, found_in_host = ask(first)
    drain(first.llm)

    second = engine(make_engine, method, DRAFTS, **settings)
    from_files, found_in_files = ask(second)
    assert cold == again == from_host == from_files == texts
    assert found == found_in_host == found_in_files
    for run in (first, second):
        assert check_proposals(run, method) < 0.2


def test_a_row_of_another_prompt_is_noticed(
    methods: Methods, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a tier compared no token after what it has."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
    monkeypatch.setattr(DraftHead, "mark_cache", lambda head: None)
    method = methods("eagle3-llama")
    run = engine(make_engine, method, DRAFTS, kv_transfer_config=offloading())
    for prompt in beginnings():
        run.generate([prompt], [9])
        drain(run.llm)
        assert run.llm.reset_prefix_cache()
    with pytest.raises(AssertionError, match="after .* tokens"):
        check_proposals(run, method)


def _answered_elsewhere(
    methods: Methods, make_engine: MakeEngine, name: str
) -> tuple[Watched, float]:
    """The engine that answered prompts of another one, with the texts of a single engine; how far
    its proposals are from those of a cold run."""
    method = methods(name)
    asked = [*prompts((70, 2)), *beginnings()[:2]]
    plain = engine(make_engine, method, 0)
    of_prompts, of_answers = (
        engine(make_engine, method, DRAFTS, kv_transfer_config=transfer(role))
        for role in ("kv_producer", "kv_consumer")
    )
    for prompt in asked:
        plain.generate([prompt], [24])
        told = {"kv_transfer_params": hand_on(of_prompts.llm, prompt)}
        (answer,) = of_answers.generate([prompt], [24], extra_args=told)
        assert answer.num_cached_tokens == len(prompt) - 1
    assert of_answers.texts() == plain.texts()
    return of_answers, check_proposals(of_answers, method)


@pytest.mark.parametrize("name", ["dflash", "mtp", "eagle3-llama"])
def test_a_drafter_goes_on_in_another_engine(
    name: str, methods: Methods, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from rows that depend on the token after them, which only the prompt tells."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
    _, difference = _answered_elsewhere(methods, make_engine, name)
    assert difference < 0.2


def test_a_sampled_token_is_not_the_prompts(
    methods: Methods, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the producer took the token that it would have sampled."""
    monkeypatch.setattr(DraftPolicy, "choose", always)

    def sampled(request: Request, token_id: int) -> None:
        request.limit_output(1)

    monkeypatch.setattr(Request, "end_with", sampled)
    monkeypatch.setattr(scheduling, "_tokens_digest", lambda request, num_tokens: 0)
    with pytest.raises(AssertionError, match="after .* tokens"):
        _answered_elsewhere(methods, make_engine, "eagle3-llama")
