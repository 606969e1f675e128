# SPDX-License-Identifier: Apache-2.0
"""What requests do and what happens to them, run with and without a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import pytest
from parity_checks import MULTIPROCESSING, MakeEngine, prompts

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.config.speculative import DRAFTS_KEY
from vllm.entrypoints.openai.serving_chat import constrain_after_reasoning
from vllm.entrypoints.openai.tool_choice import call_list_schema
from vllm.reasoning import reasoning_parsers
from vllm.sampling_params import StructuredOutputsParams

#: fp32 logprobs: a row of a matmul of more rows may be added up in another order
BOUND = 1e-5


#: by method, its settings beside `num_speculative_tokens`
METHODS: dict[str, dict[str, Any]] = {
    "replay": {"acceptance": 0.6, "seed": 1},
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
}


def engine(
    make_engine: MakeEngine,
    drafts: int,
    family: str = "qwen3_5",
    method: str = "replay",
    **settings: Any,
) -> LLM:
    if drafts:
        speculation = {"method": method, "num_speculative_tokens": drafts, **METHODS[method]}
        settings["speculative_config"] = speculation
    settings = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 96,
        "async_scheduling": True,
    } | settings
    return make_engine(family, **settings)


Told = dict[int, list[int]]


class Run:
    """Outputs of one engine. What a plain engine generates becomes the drafts of another: `told`
    has it by the order of the calls."""

    def __init__(self, llm: LLM, told: Told | None = None) -> None:
        self.llm, self.told = llm, told
        self.outputs: list[RequestOutput] = []
        self.counted = 0

    def generate(
        self,
        token_ids: list[list[int]],
        lengths: list[int],
        constraints: Sequence[StructuredOutputsParams | None] = (),
        **fields: Any,
    ) -> list[Any]:
        params = []
        for i, length in enumerate(lengths):
            drafts = None
            if self.told is not None:
                drafts = {DRAFTS_KEY: self.told[self.counted + i]}
            given = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2} | fields
            if constraints:
                given["structured_outputs"] = copy(constraints[i])
            params.append(SamplingParams(max_tokens=length, extra_args=drafts, **given))
        batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        outputs = self.llm.generate(batch, params, use_tqdm=False)
        self.counted += len(lengths)
        self.outputs += outputs
        return outputs

    def drafts(self) -> tuple[int, int]:
        """How many were accepted and rejected."""
        counts = [one.num_drafts or (0, 0) for o in self.outputs for one in o.outputs]
        return sum(a for a, _ in counts), sum(r for _, r in counts)

    def tokens(self) -> Told:
        return {i: list(o.outputs[0].token_ids) for i, o in enumerate(self.outputs)}


def batches(run: Run) -> None:
    """More requests than rows, prompts in chunks beside decodes."""
    lengths = (3, 17, 1, 140, 70, 5, 200, 33, 2, 64)
    run.generate(prompts(lengths), [5 + 4 * i for i in range(len(lengths))])


def a_conversation(run: Run) -> None:
    """Each turn begins with what the turns before left in the cache."""
    tokens: list[int] = []
    for question, length in zip(prompts((30, 1, 17, 25)), (19, 16, 17, 21), strict=True):
        tokens += question
        (output,) = run.generate([tokens], [length])
        tokens = tokens + list(output.outputs[0].token_ids)


def forks(run: Run) -> None:
    """Completions of one prompt start from copies of its state; one prompt twice hits the cache."""
    (prompt,) = prompts((65,))
    run.generate([prompt], [24], n=3, temperature=1.0, seed=7)
    run.generate([prompt, prompt[:40]], [12, 12])


def rules(run: Run) -> None:
    """Every filter, and rules on the output, which the drafts before a token belong to."""
    batch = prompts((20, 30, 9, 44))
    lengths = [20, 24, 16, 30]
    stops = {"stop_token_ids": list(range(0, 256, 9))}
    run.generate(batch[:2], [20, 24], temperature=0.9, seed=3, top_k=30, top_p=0.9, min_p=0.01)
    run.generate(batch, lengths, presence_penalty=0.7, frequency_penalty=0.3, min_tokens=4)
    run.generate(batch, lengths, repetition_penalty=1.4, temperature=0.8, seed=1)
    run.generate(batch, lengths, min_tokens=7, logit_bias={5: 1.5, 77: -3.0}, **stops)
    run.generate(batch, lengths, allowed_token_ids=[*range(40, 60), 200], **stops)
    run.generate(batch, lengths, bad_words=["a", "th", "ing"], temperature=1.0, seed=9)
    run.generate(batch, [24, 3, 18, 9], **stops)


def ends(run: Run) -> None:
    """Stop strings, which the front end finds after the fact; scored prompts, beside decodes of
    fewer tokens than their step is wide; both in completions of one prompt."""
    lengths = (3, 17, 1, 140, 70, 5, 200, 33, 2, 64)
    run.generate(prompts(lengths), [4 + i for i in range(len(lengths))], prompt_logprobs=1)
    batch = prompts((20, 30, 9, 44))
    words = ["e", "1", "th", "\u0120", "\n"]
    run.generate(batch, [60] * 4, stop=words)
    run.generate(batch, [60] * 4, stop=words, include_stop_str_in_output=True, min_tokens=3)
    run.generate(batch[:2], [30] * 2, stop=["z"], n=2, temperature=0.9, seed=4, prompt_logprobs=2)


def preemptions(run: Run) -> None:
    """Running requests lose their rows and come back."""
    num_steps = _preempting(run, (6, 9, 10))
    run.generate(prompts((30, 47)), [34, 40])
    assert num_steps() > 10


def _preempting(run: Run, at: tuple[int, ...]) -> Callable[[], int]:
    """Before the `at`-th steps from here on all running requests are preempted; returns how many
    there were so far."""
    if MULTIPROCESSING == "1":
        pytest.skip("the schedulers of replicas are in other processes")
    scheduler = run.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, 0

    def schedule_and_preempt() -> Any:
        nonlocal steps
        steps += 1
        if steps in at:
            while scheduler.running:
                scheduler._preempt_last()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    return lambda: steps


def aborts(run: Run) -> None:
    """Others leave at random; their rows and blocks are used again."""
    engine, abandoned = run.llm.llm_engine, prompts((12, 50, 31), seed=5)
    for i, ids in enumerate(abandoned):
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        engine.add_request(f"abandoned-{i}", TokensPrompt(prompt_token_ids=ids), params)
        for _ in range(4 + i):
            engine.step()
        engine.abort_request([f"abandoned-{i}"])
    run.generate(prompts((25, 64)), [30, 22])


def constraints() -> list[StructuredOutputsParams]:
    """One of every kind; the last is a required tool, behind reasoning that its budget ends."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "tag": {"enum": ["grün", 3]}},
        "required": ["name", "tag"],
    }
    tools = {"day": schema, "now": {"type": "object", "properties": {}}}
    calls = StructuredOutputsParams(json=call_list_schema(tools, parallel=True))
    parser = reasoning_parsers.get("qwen3")("<think>\n")
    reasoned = constrain_after_reasoning(calls, parser, 262)
    assert reasoned.reasoning is not None and reasoned.reasoning.max_tokens == 6
    return [
        StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        StructuredOutputsParams(regex=r"[^z]{5,20}(-[0-9]{2}){1,4}"),
        StructuredOutputsParams(choice=["yes", "no", "perhaps, but I would rather not say"]),
        StructuredOutputsParams(grammar='root ::= "(" root ")" | [a-c]{1,9} | "\u00e9" root'),
        calls,
        reasoned,
    ]


def grammars(run: Run) -> None:
    """Constrained requests beside each other and free ones, in chunks, out of the cache, in several
    completions, under further rules; some lose their rows, others leave."""
    batch = prompts((20, 3, 140, 44, 9, 70, 31))
    given = [*constraints(), None]
    lengths = [30, 40, 38, 24, 60, 70, 45]
    _leave(run, batch[:2], given)
    run.generate(batch, lengths, given)
    _preempting(run, (6, 9, 10, 17))
    for parts in (batch, [tokens[:-1] for tokens in batch]):
        run.generate(parts, lengths, given, temperature=0.9, seed=3)
    run.generate(batch[:2], [16, 12], given[1:3], n=2, temperature=1.0, seed=4, ignore_eos=False)
    run.generate(batch[3:5], [20, 14], given[:2], frequency_penalty=0.5, bad_words=["E", "si"])
    stops = {"stop_token_ids": [ord("D"), ord(":")], "min_tokens": 4}
    run.generate(batch[:2], [20, 30], given[:2], temperature=1.2, seed=8, **stops)


def _leave(run: Run, token_ids: list[list[int]], given: Sequence[Any]) -> None:
    """Constrained requests that are given up."""
    engine = run.llm.llm_engine
    for i, ids in enumerate(token_ids):
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=copy(given[i]))
        engine.add_request(f"left-{i}", TokensPrompt(prompt_token_ids=ids), params)
        for _ in range(7 + i):
            engine.step()
        engine.abort_request([f"left-{i}"])


SCENARIOS = (batches, a_conversation, forks, rules, grammars, ends, preemptions, aborts)


def compare(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one.prompt_logprobs or []) == len(other.prompt_logprobs or [])
        for mine, theirs in zip(
            one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True
        ):
            assert (mine is None) == (theirs is None)
            for token, entry in (mine or {}).items():
                assert theirs is not None
                assert abs(entry.logprob - theirs[token].logprob) < BOUND
        for ours, plain in zip(one.outputs, other.outputs, strict=True):
            assert list(ours.token_ids) == list(plain.token_ids)
            assert ours.finish_reason == plain.finish_reason
            assert ours.stop_reason == plain.stop_reason and ours.text == plain.text
            for mine, theirs in zip(ours.logprobs or [], plain.logprobs or [], strict=True):
                assert set(mine) == set(theirs)
                for token, entry in mine.items():
                    assert abs(entry.logprob - theirs[token].logprob) < BOUND


#: what scenarios gave without drafts, by the scenario and its engine's settings
_plain: dict[Any, tuple[list[RequestOutput], Told]] = {}


def _without_drafts(
    make_engine: MakeEngine, scenario: Callable[[Run], None], settings: dict[str, Any]
) -> tuple[list[RequestOutput], Told]:
    """Outputs and drafts for other engines; computed once for all that are compared with it."""
    key = (scenario, *sorted(settings.items()))
    if key not in _plain:
        plain = Run(engine(make_engine, 0, **settings))
        scenario(plain)
        _plain[key] = plain.outputs, plain.tokens()
    return _plain[key]


def with_drafts(
    make_engine: MakeEngine,
    scenario: Callable[[Run], None],
    width: int,
    method: str = "replay",
    **settings: Any,
) -> Run:
    """Compares the scenario's outputs with and without `width - 1` drafts; the run with them."""
    expected, tokens = _without_drafts(make_engine, scenario, settings)
    told = tokens if method == "replay" else None
    drafted = Run(engine(make_engine, width - 1, method=method, **settings), told)
    scenario(drafted)
    compare(drafted.outputs, expected)
    return drafted
